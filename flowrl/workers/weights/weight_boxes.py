"""The weights of a model as boxes in the names and coordinates of its Hugging Face checkpoint, and their digest.

Every backend describes what a rank holds in this one way, so that any two can be moved between, saved and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import ModelError
from ...splitmix import GOLDEN, mix

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]

#: Numbers at a time: in the caches of a CPU, which is nine times as fast as out of them; more where calls cost more.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class Shard:
    """A box of one weight: ``Shard("model.norm.weight", shape=(64,), offset=(32,), tensor=half)``.

    ``shape`` is that of the whole weight, ``offset`` where ``tensor`` begins along each dim. ``main``: of the ranks
    that hold the same numbers, this is the one that counts.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor = field(repr=False)
    main: bool = True

    @property
    def box(self) -> Box:
        """The range along each dim, first and behind the last: ``((32, 64),)``."""
        return tuple((o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))

    def view(self, box: Box) -> Tensor:
        """The part of ``tensor`` in a box that lies inside of this one's, in the coordinates of the whole weight."""
        at = tuple(slice(a - o, b - o) for (a, b), o in zip(box, self.offset, strict=True))
        return self.tensor[at]


#: By name: dtype, shape, and the sum over the numbers that were seen.
Sums = Mapping[str, tuple[str, tuple[int, ...], int]]


def sums(shards: Iterable[Shard], dtype: Any = None) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """For each weight the sum modulo 2^64 over the numbers in the main shards, each mixed with its place.

    Sums of ranks add up (:func:`digest`), however the weights are cut. ``dtype``: the numbers as they are in it.
    """
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for shard in shards:
        tensor = shard.tensor.detach()
        kind = str(dtype or tensor.dtype).removeprefix("torch.")
        here = _summed(tensor.to(dtype or tensor.dtype), shard.shape, shard.offset) if shard.main else 0
        _add(found, shard.name, kind, tuple(shard.shape), here)
    return found


def digest(parts: Iterable[Sums]) -> str:
    """sha256 over names, dtypes, shapes and sums, those of all ranks added up: the same for every layout.

    Raises ModelError for a weight that has another dtype or shape on one rank than on another.
    """
    total: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for part in parts:
        for name, (kind, shape, here) in part.items():
            _add(total, name, kind, tuple(shape), here)
    made = hashlib.sha256()
    for name, (kind, shape, here) in sorted(total.items()):
        made.update(f"{name} {kind} {list(shape)} {here:016x}\n".encode())
    return made.hexdigest()


def _add(
    total: dict[str, tuple[str, tuple[int, ...], int]], name: str, kind: str, shape: tuple[int, ...], here: int
) -> None:
    first = total.setdefault(name, (kind, shape, 0))
    if first[:2] != (kind, shape):
        raise ModelError(
            f"{name} is {first[0]} {list(first[1])} in one place and {kind} {list(shape)} in another.",
            fix="Open all ranks with the same dtype, and describe weights in the shapes of the checkpoint.",
        )
    total[name] = (kind, shape, (first[2] + here) % (1 << 64))


def _summed(tensor: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> int:
    """The sum over one box, some numbers at a time, on the device where it is."""
    import torch

    if not tensor.numel():
        return 0
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    whole, begin = shape or (1,), offset or (0,)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    most = _CHUNK if tensor.device.type == "cpu" else _CHUNK << 6
    step, total = max(1, most // max(1, rows[:1].numel())), torch.zeros((), dtype=torch.int64, device=tensor.device)
    place = torch.ones((), dtype=torch.int64, device=tensor.device)  # of each number of the first rows, from 1 on
    for dim, count in enumerate((min(step, rows.shape[0]), *rows.shape[1:])):
        place = place[..., None] + (torch.arange(count, device=tensor.device) + begin[dim]) * strides[dim]
    place *= GOLDEN
    for a in range(0, rows.shape[0], step):
        part = rows[a : a + step].contiguous()
        mixed = place[: part.shape[0]] + _bits(part)
        mixed += (a * strides[0] * GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)  # modulo 2^64, as an i64
        total += mix(mixed).sum()
    return int(total.item()) % (1 << 64)


def _bits(tensor: Tensor) -> Tensor:
    """The bits of each number as a whole number; both zeros are the same."""
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    if tensor.is_floating_point():
        tensor = tensor + 0.0 if tensor.itemsize > 1 else torch.where(tensor == 0, torch.zeros_like(tensor), tensor)
    return tensor.view(whole) if tensor.dtype != torch.bool else tensor
