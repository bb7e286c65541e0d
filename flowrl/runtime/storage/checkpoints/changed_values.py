"""What a program has changed since its loop began, of its variables and at module level, as a record and back."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, cast

from ....graph.script.surroundings import Surroundings
from ....graph.stand_ins.values import Value
from ...values.plain_values import CannotKeep, Reader, Writer
from .left_behind import changes_of, fill, part_name, set_shared, shared_generators, written

Kept = Callable[[Any], Any]
#: Modules whose objects do not change, or have no part in what a program does.
_UNCHANGING = frozenset(
    {"builtins", "types", "functools", "operator", "re", "pathlib", "pathlib._local", "datetime", "decimal"}
    | {"fractions", "uuid", "enum", "typing", "abc", "dataclasses", "logging", "threading", "_thread", "string"}
    | {"inspect", "importlib", "zipimport", "_frozen_importlib", "_frozen_importlib_external", "__future__", "zoneinfo"}
)
_CONTAINERS = (deque, OrderedDict, defaultdict, Counter)
_ARRAYS = ("Tensor", "Parameter", "ndarray", "Generator", "RandomState", "dtype", "device", "Size")


class ChangedValues:
    """The values that a loop begins with: the program's variables, what is at module level, and what these hold.

    ``used`` are the names that the program's code has. Raises CannotKeep where one of them is an object of a library,
    which may change in ways that nobody sees, and where a batch is inside of another value.
    """

    def __init__(self, fn: Callable[..., Any], names: Mapping[str, Any], *, used: frozenset[str]) -> None:
        self._names, self._used = dict(names), used
        self._around = _Around(fn, names=names)
        if self._around.inside:
            raise CannotKeep(f"{self._around.inside} holds a batch as the loop begins")
        if not self._around.whole:
            raise CannotKeep("there are too many values at module level")
        for name, value in self._around.seen:
            if self._matters(name) and not self._is_seen(value):
                raise CannotKeep(f"{name} is {_a(type(value).__name__)}")
        self._shared = shared_generators()
        self._labels = {id(value): label for label, value in Writer(self._around).objects.items()}

    def label(self, value: Any) -> list[Any] | None:
        """Return what a value is called in records; None where it was not there as the loop began."""
        label = self._labels.get(id(value))
        return None if label is None else list(label)

    def labelled(self, label: list[Any]) -> Any:
        """Return the value that is called so."""
        return Reader(self._around).objects[tuple(label)]

    def record(self, names: Mapping[str, Any], hook: Callable[[Any, Kept], Any]) -> dict[str, Any]:
        """Return the variables, and what has changed. ``hook`` writes what is not plain. Raises CannotKeep."""
        writer = _Writer(self._around, hook)
        if taken := [name for name in self._around.taken() if self._matters(name)]:
            raise CannotKeep(f"{taken[0]} cannot be put back to where it is")
        lines: list[dict[str, Any]] = []
        for label, place in writer.places.items():
            for part, change in changes_of(place):
                name = part_name(place, part)
                try:
                    lines.append({"place": list(label), **written(writer, change)})
                except CannotKeep as why:
                    if self._matters(name):
                        raise CannotKeep(f"{name} is {why}") from None
        said: dict[str, Any] = {}
        for name, value in names.items():
            try:
                said[name] = writer.trial(lambda value=value: writer.kept(value))
            except CannotKeep as why:
                raise CannotKeep(f"{name} is {why}") from None
        drawn = {n: state for n, state in shared_generators().items() if state != self._shared.get(n)}
        return {"begins": _digest(writer), "places": lines, "names": said, "random": drawn}

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether the loop has begun with the same values as when the record was written."""
        return record["begins"] == _digest(Reader(self._around))

    def put_back(self, record: Mapping[str, Any], made: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
        """Change what was changed, and return the variables. ``made`` reads what a hook wrote."""
        reader = _Reader(self._around, made)
        for line in record["places"]:
            fill(reader, reader.places[tuple(line["place"])], line)
        names = {name: reader.value(said) for name, said in record["names"].items()}
        set_shared(record["random"])
        return names

    def _matters(self, name: str) -> bool:
        """Whether the program can come to a value of this name."""
        root = name.partition("[")[0].partition(".")[0]
        return root in self._names or root in self._used

    def _is_seen(self, value: Any) -> bool:
        """Whether a change of a value is seen, or it does not change."""
        kind = cast("type[Any]", type(value))
        library = kind.__module__.partition(".")[0]
        if self._around.is_own(kind) or library == "flowrl" or isinstance(value, (type, Enum)):
            return True
        if kind.__module__ in _UNCHANGING or kind in _CONTAINERS or hasattr(kind, "__next__"):
            return True
        if library in ("torch", "numpy"):
            return kind.__name__ in _ARRAYS or callable(value) or hasattr(value, "dtype")
        return (is_dataclass(kind) and cast("Any", kind).__dataclass_params__.frozen) or kind.__module__ in ("random",)


class _Around(Surroundings):
    """Surroundings that hold no batches: those would not be let go of."""

    inside = ""

    def _look_at(self, name: str, value: Any) -> None:
        if isinstance(value, Value):
            self.inside = self.inside or name
        else:
            super()._look_at(name, value)


class _Writer(Writer):
    def __init__(self, around: Surroundings, hook: Callable[[Any, Kept], Any]) -> None:
        super().__init__(around)
        self._hook = hook

    def kept(self, value: Any) -> Any:
        return self._hook(value, super().kept)


class _Reader(Reader):
    def __init__(self, around: Surroundings, made: Callable[[Mapping[str, Any]], Any]) -> None:
        super().__init__(around)
        self._of_hook = made

    def value(self, said: Any) -> Any:
        if isinstance(said, dict) and cast("dict[str, Any]", said)["$"] == "value":
            return self._of_hook(said)
        return super().value(said)


def _digest(labels: Writer | Reader) -> str:
    """A digest of what everything around a loop is called."""
    names: Iterator[Any] = (list(label) for label in (*labels.objects, *labels.places))
    return hashlib.blake2b(json.dumps(list(names)).encode(), digest_size=16).hexdigest()


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"
