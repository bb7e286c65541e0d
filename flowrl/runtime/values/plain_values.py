"""Values of Python as JSON and back: plain ones of any nesting, with what is shared between them, and arrays.

What was there before is named by where it was; nothing that is read can run code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from ...graph.script.surroundings import Place, Surroundings

LARGEST = 1 << 20  # characters of one place: more is not written down
_PLAIN = (type(None), bool, int, float, str)
_ORDERED: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPED: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Any] = {"int": int, "float": float, "str": str, "list": list, "dict": dict, "set": set}


class CannotKeep(Exception):
    """A value that no record can hold: its kind."""


class Labels:
    """What every object around the programs is called in records: its name, its kind, and which of several it is."""

    def __init__(self, around: Surroundings) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self.objects = {self._label(name, type(value).__name__): value for name, value in around.seen}
        self.places: dict[tuple[Any, ...], Place] = {}
        for place in around.places:
            module = place.holder.get("__name__", "") if place.kind == "names" else ""
            self.places[self._label(place.name or module, place.kind)] = place

    def _label(self, name: str, kind: str) -> tuple[Any, ...]:
        self._counts[name, kind] += 1
        return name, kind, self._counts[name, kind]


class Writer(Labels):
    """Writes values down."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._labels = {id(value): label for label, value in self.objects.items()}
        self._new: dict[int, tuple[int, Any]] = {}  # objects that were made since then, by number

    def trial(self, write: Callable[[], Any]) -> Any:
        """What ``write`` returns; nothing of it is remembered where it raises CannotKeep."""
        before, self._size = dict(self._new), 0
        try:
            return write()
        except CannotKeep:
            self._new = before
            raise

    def kept(self, value: Any) -> Any:
        """A value as JSON. Raises CannotKeep."""
        kind = cast("type[Any]", type(value))
        self._size += len(value) if kind is str else 8
        if self._size > LARGEST:
            raise CannotKeep("more than a checkpoint takes")
        if kind in _PLAIN:
            return value
        if id(value) in self._labels:
            return {"$": "there", "label": list(self._labels[id(value)])}
        if id(value) in self._new:
            return {"$": "same", "number": self._new[id(value)][0]}
        if (kind.__name__ in _ORDERED and kind is _ORDERED[kind.__name__]) or kind is deque:
            number = self._number(value)
            items = sorted(value, key=repr) if kind in (set, frozenset) else list(value)
            more = {"maxlen": value.maxlen} if kind is deque else {}
            return {"$": kind.__name__, "number": number, "items": [self.kept(v) for v in items], **more}
        if (kind.__name__ in _MAPPED and kind is _MAPPED[kind.__name__]) or kind is defaultdict:
            number = self._number(value)
            more = {"factory": self._factory(value.default_factory)} if kind is defaultdict else {}
            pairs = [[self.kept(k), self.kept(v)] for k, v in value.items()]
            return {"$": kind.__name__, "number": number, "pairs": pairs, **more}
        if kind in (bytes, bytearray):
            return {"$": kind.__name__, "hex": value.hex()}
        return self.numbers(value)

    def _number(self, value: Any) -> int:
        self._new[id(value)] = (len(self._new), value)  # kept, so that no other object gets its id
        return len(self._new) - 1

    def _factory(self, factory: Any) -> str | None:
        if factory is None or factory in _FACTORIES.values():
            return None if factory is None else factory.__name__
        raise CannotKeep("a defaultdict of what the script makes")

    def numbers(self, value: Any) -> Any:
        """The numbers of a tensor or an array as JSON. Raises CannotKeep."""
        kind = cast("type[Any]", type(value))
        library = kind.__module__.partition(".")[0]
        plain: Any = value
        if library == "torch" and kind.__name__ == "Tensor":
            try:
                plain = value.detach().cpu().numpy()
            except TypeError:  # numpy has no bfloat16
                plain = None
        if library not in ("torch", "numpy") or not hasattr(plain, "tobytes") or plain.dtype.hasobject:
            raise CannotKeep(f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {kind.__name__}")
        self._size += 2 * plain.nbytes
        if self._size > LARGEST:
            raise CannotKeep("more than a checkpoint takes")
        said = {"dtype": str(plain.dtype), "shape": list(plain.shape), "hex": plain.tobytes().hex()}
        return {"$": "tensor" if library == "torch" else "array" if kind.__name__ == "ndarray" else "scalar", **said}


class Reader(Labels):
    """Reads what a writer has written, in a process whose modules were loaded alike."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._made: dict[int, Any] = {}

    def value(self, said: Any) -> Any:
        """The value that was written so. Raises KeyError where it was there before, and is not here."""
        if not isinstance(said, dict):
            return said
        of = cast("dict[str, Any]", said)
        kind = of["$"]
        if kind == "there":
            return self.objects[tuple(of["label"])]
        if kind == "same":
            return self._made[of["number"]]
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(of["hex"])
        if kind in ("array", "tensor", "scalar"):
            return _array(of)
        if kind in ("tuple", "frozenset"):
            made = self._made[of["number"]] = _ORDERED[kind](self.value(v) for v in of["items"])
            return made
        if "pairs" in of:
            made: Any = defaultdict(_FACTORIES.get(of["factory"])) if kind == "defaultdict" else _MAPPED[kind]()
            self._made[of["number"]] = made
            for key, value in of["pairs"]:
                made[self.value(key)] = self.value(value)
            return made
        made = cast("Any", deque)(maxlen=of["maxlen"]) if kind == "deque" else _ORDERED[kind]()
        self._made[of["number"]] = made
        items = (self.value(v) for v in of["items"])
        made.update(items) if kind == "set" else made.extend(items)
        return made


def _array(said: Mapping[str, Any]) -> Any:
    import numpy as np

    array = np.frombuffer(bytes.fromhex(said["hex"]), dtype=said["dtype"]).reshape(said["shape"]).copy()
    if said["$"] == "tensor":
        import torch

        return torch.from_numpy(array)
    return array[()] if said["$"] == "scalar" else array
