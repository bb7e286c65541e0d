"""What a worker keeps, as a checkpoint holds it: plain values of any nesting, with tensors beside them."""

from __future__ import annotations

import hashlib
import marshal
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ..errors import At, WorkerError

if TYPE_CHECKING:
    from torch import Tensor

_TAG = "$kind"  # of a record that JSON has no form for
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict}
_PLAIN = (type(None), bool, int, float, str)


def pack(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, with its tensors put into ``tensors`` under names that begin with ``name``.

    Raises WorkerError, which says where in the value, for what a checkpoint cannot hold.
    """
    of: type[Any] = type(value)
    kind = of.__name__
    if of in _PLAIN:
        return value
    if of is list:
        return [pack(f"{name}/{i}", v, tensors) for i, v in enumerate(value)]
    if of is dict and all(isinstance(k, str) and k != _TAG for k in value):
        return {k: pack(f"{name}/{k}", v, tensors) for k, v in value.items()}
    if of in (tuple, set, frozenset, deque):
        items: list[Any] = list(value)
        items = sorted(items, key=repr) if of in (set, frozenset) else items
        more = {"maxlen": value.maxlen} if of is deque else {}
        return {_TAG: kind, "items": [pack(f"{name}/{i}", v, tensors) for i, v in enumerate(items)], **more}
    if of in (dict, OrderedDict, Counter):
        pairs = enumerate(value.items())
        items = [[pack(f"{name}/{i}.key", k, tensors), pack(f"{name}/{i}", v, tensors)] for i, (k, v) in pairs]
        return {_TAG: kind, "items": items}
    if of is bytes:
        return {_TAG: kind, "hex": value.hex()}
    if _is_tensor(value):
        if not value.numel():  # files of tensors have no empty ones
            return {_TAG: "empty", "shape": list(value.shape), "dtype": str(value.dtype).rpartition(".")[2]}
        tensors[name] = value
        return {_TAG: "tensor", "name": name}
    if _is_array(value):
        import torch

        if not value.shape:
            return value.item()
        packed = pack(name, torch.as_tensor(value), tensors)
        return {_TAG: "array", "of": packed}
    raise WorkerError(
        f"'{name}' is a {kind}, which a checkpoint cannot hold.",
        have="numbers, texts, tensors, arrays; lists, tuples, sets, deques, dicts and Counters of them",
        fix="Keep what it can be made of again, such as rng.getstate() of a random generator.",
    )


def unpack(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`pack` was given."""
    if isinstance(record, list):
        return [unpack(r, tensors) for r in cast("list[Any]", record)]
    if not isinstance(record, dict):
        return record
    said = cast("dict[str, Any]", record)
    if _TAG not in said:
        return {k: unpack(r, tensors) for k, r in said.items()}
    kind = said[_TAG]
    if kind == "tensor":
        return tensors[said["name"]]
    if kind == "array":
        return unpack(said["of"], tensors).numpy()
    if kind == "empty":
        import torch

        return torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]))
    if kind == "bytes":
        return bytes.fromhex(said["hex"])
    items = [unpack(r, tensors) for r in said["items"]]
    if kind == "deque":
        return deque(items, said["maxlen"])
    if kind == "Counter":
        return Counter(dict(items))
    return _SEQUENCES[kind](items) if kind in _SEQUENCES else _MAPPINGS[kind](items)


def undeclared(title: str, name: str, kind: str, at: At) -> WorkerError:
    """The error of an op that changes what its worker keeps without a word: a resumed run would not have it."""
    return WorkerError(
        f"{title} changes '{name}', which {kind} keeps, and does not declare it.",
        at=at,
        fix=f'Write @fl.op(..., updates="{name}"): then it is saved, and the op is not run again for the same rows.',
    )


class Mark:
    """What a value is now, to be held against what it is later. Tensors are told by their count of changes, not read.

    >>> seen = {"a": [1, 2]}; mark = Mark(seen); seen["a"].append(3); mark.holds(seen)
    False
    """

    def __init__(self, value: Any) -> None:
        self._tensors: list[tuple[Any, int]] = []
        self._digest = self._read(value)

    def holds(self, value: Any) -> bool:
        """Whether a value is what this one was."""
        now = Mark(value)
        if now._digest != self._digest or len(now._tensors) != len(self._tensors):
            return False
        return all(_same(a, b) for a, b in zip(self._tensors, now._tensors, strict=True))

    def _read(self, value: Any) -> bytes:
        if _is_tensor(value) and not value.is_inference():  # those count no changes
            self._tensors.append((value, value._version))
            return b"tensor"
        try:
            return hashlib.blake2b(marshal.dumps(value, 2)).digest()  # the second format says nothing of identities
        except ValueError:
            pass
        total = hashlib.blake2b(type(value).__name__.encode())
        if isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                total.update(self._read(key) + self._read(item))
        elif isinstance(value, (list, tuple, deque)):
            for item in cast("Any", value):
                total.update(self._read(item))
        elif _is_tensor(value):
            total.update(f"{value.dtype} {value.shape}".encode() + value.cpu().contiguous().view(-1).numpy().tobytes())
        elif _is_array(value):
            total.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        else:
            total.update(repr(value).encode())
        return total.digest()


def _same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    (old, version), (new, _) = before, now
    if old._version != version:
        return False
    return old is new or (old.shape == new.shape and old.dtype == new.dtype and bool((old == new).all()))


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "is_inference")


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes")
