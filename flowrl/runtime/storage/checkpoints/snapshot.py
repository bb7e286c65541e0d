"""The state of a worker as it is now, in memory that nobody changes: files are written from there while it trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ....workers.base import Worker
from ....workers.model_worker import KEPT, ModelWorker
from ....workers.weights.weight_boxes import Shard
from ..disk import Checksum
from .host_memory import free_memory
from .state_files import write_record, write_shards

if TYPE_CHECKING:
    from torch import Tensor

    from ....workers.base import ShardedState

#: Bytes that are copied between two looks at how much memory the host has left; less than that is copied in any case.
AT_A_TIME = 64 << 20


class Offloaded(Protocol):
    """An engine's state that is out of memory: see :class:`flowrl.workers.weights.offloaded.Offloaded`."""

    @property
    def state(self) -> ShardedState | None: ...
    def finder(self) -> Callable[[Tensor], Tensor | None]: ...


@dataclass(frozen=True)
class Captured:
    """A part of a checkpoint: ``write`` writes its files, or waits until ranks have, and gives their checksums.

    ``lacking``: bytes of memory that were not there for a copy. Then it is written from what the worker has, which
    must not change until that is done.
    """

    write: Callable[[], Mapping[str, Checksum]]
    lacking: int = 0


class Copies:
    """Memory for a copy of one worker's state: ``Copies().take(shards)``.

    It is kept from one checkpoint to the next, as the first use of memory costs several times what copying costs. The
    copy of what lies on a device is in pinned memory.
    """

    def __init__(self) -> None:
        self._memory: dict[Place, Tensor] = {}

    def take(self, shards: Iterable[Shard]) -> tuple[list[Shard], int]:
        """Copies of shards, and 0; where the host has no memory for them the shards as they are, and what lacks."""
        shards = list(shards)
        had, self._memory = self._memory, {}
        fits = {_place(s): had[_place(s)] for s in shards if _place(s) in had and _is_like(had[_place(s)], s.tensor)}
        had.clear()
        new = sum(s.tensor.nbytes for s in shards if _place(s) not in fits)
        look_at, copied = new, list[Shard]()
        for shard in shards:
            memory = fits.get(_place(shard))
            if memory is None:
                if AT_A_TIME < new <= look_at:  # other processes may be filling their copies
                    if (lacking := new - free_memory()) > 0:
                        return shards, lacking
                    look_at = new - AT_A_TIME
                memory, new = _memory_for(shard.tensor), new - shard.tensor.nbytes
            copied.append(replace(shard, tensor=memory.copy_(shard.tensor, non_blocking=True)))
        _wait_for_devices(shards)
        self._memory = {_place(s): s.tensor for s in copied}
        return copied, 0


def capture_state(
    folder: Path, name: str, worker: Worker, copies: Copies, *, part: int = 0, offloaded: Offloaded | None = None
) -> Captured:
    """Copy a rank's part of a worker's state.

    It is for the files of :mod:`flowrl.runtime.storage.checkpoints.state_files`. The first part has what
    is no tensor. What is ``offloaded`` is not copied: it lies where nobody writes.
    """
    away = None if offloaded is None else offloaded.state
    shards, record = worker.state_shards() if away is None else cast("ModelWorker", worker).state_shards(away)
    text = json.dumps(record)
    if part:  # every rank has what a worker keeps besides its model
        shards = [s for s in shards if not s.name.startswith(KEPT)]
    counted = [s for s in shards if s.main and s.tensor.numel()]
    find = offloaded.finder() if offloaded is not None else lambda tensor: None
    elsewhere = {_place(s): found for s in counted if (found := find(s.tensor)) is not None}
    copied, lacking = copies.take(s for s in counted if _place(s) not in elsewhere)
    copied += [replace(s, tensor=elsewhere[_place(s)]) for s in counted if _place(s) in elsewhere]

    def write() -> dict[str, Checksum]:
        found = write_shards(folder, name, part, copied)
        return found if part else found | write_record(folder, name, text)

    return Captured(write, lacking)


Place = tuple[str, tuple[int, ...], bool]


def _place(shard: Shard) -> Place:
    """What tells a shard from others of its worker and rank, and the kind of memory that its copy is in."""
    return shard.name, tuple(shard.offset), shard.tensor.is_cuda


def _is_like(memory: Tensor, tensor: Tensor) -> bool:
    return (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype)


def _memory_for(tensor: Tensor) -> Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _wait_for_devices(shards: Iterable[Shard]) -> None:
    """Return when copies from devices are done."""
    import torch

    for device in {s.tensor.device for s in shards if s.tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
