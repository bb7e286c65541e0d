"""The state of a worker as it is now, in memory that nobody changes: files are written from there while it trains."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ....workers.base import Worker
from ....workers.engine import has_weights
from ....workers.model_worker import KEPT, ModelWorker
from ....workers.weights.weight_boxes import Shard
from ..disk import Checksum
from .host_memory import free_memory
from .state_files import write_record, write_shards

if TYPE_CHECKING:
    from torch import Tensor, dtype

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

    It is kept from one checkpoint to the next, as the first use of memory costs several times what copying costs:
    :meth:`reserve` has done that before the first one. The copy of what lies on a device is in pinned memory.
    """

    def __init__(self) -> None:
        self._memory: dict[Place, Tensor] = {}
        self._reserving: threading.Thread | None = None
        self._enough = threading.Event()

    def reserve(self, shards: Iterable[Shard]) -> None:
        """Begin to take memory for copies of shards, in a thread; nothing where it is little, or the host lacks it."""
        shards = list(shards)
        size = sum(s.tensor.nbytes for s in shards)
        if AT_A_TIME < size <= free_memory():
            wanted = {_place(s): (tuple(s.tensor.shape), s.tensor.dtype) for s in shards}
            self._reserving = threading.Thread(target=self._use, args=[wanted], name="memory of copies", daemon=True)
            self._reserving.start()

    def _use(self, wanted: Mapping[Place, tuple[tuple[int, ...], dtype]]) -> None:
        """Take memory of some shapes and kinds, and write all of it once, until that is enough."""
        for place, (shape, kind) in wanted.items():
            if self._enough.is_set():
                return
            try:
                memory = _memory_for(shape, kind, pinned=place[2])
            except (RuntimeError, MemoryError):  # a checkpoint says what lacks
                return
            if not place[2]:
                ctypes.memset(memory.data_ptr(), 0, memory.nbytes)  # without the interpreter's lock
            self._memory[place] = memory

    def take(self, shards: Iterable[Shard]) -> tuple[list[Shard], int]:
        """Copies of shards, and 0; where the host has no memory for them the shards as they are, and what lacks."""
        shards = list(shards)
        if self._reserving is not None:
            self._enough.set()
            self._reserving.join()
            self._reserving = None
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
                like = shard.tensor
                memory, new = _memory_for(tuple(like.shape), like.dtype, pinned=like.is_cuda), new - like.nbytes
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
    counted = _counted(shards, part)
    find = offloaded.finder() if offloaded is not None else lambda tensor: None
    elsewhere = {_place(s): found for s in counted if (found := find(s.tensor)) is not None}
    copied, lacking = copies.take(s for s in counted if _place(s) not in elsewhere)
    copied += [replace(s, tensor=elsewhere[_place(s)]) for s in counted if _place(s) in elsewhere]

    def write() -> dict[str, Checksum]:
        found = write_shards(folder, name, part, copied)
        return found if part else found | write_record(folder, name, text)

    return Captured(write, lacking)


def reserve_memory(worker: Worker, copies: Copies, *, offloaded: Offloaded | None = None) -> None:
    """Begin to take the memory that :func:`capture_state` will need for the model of a worker that was updated once."""
    away = offloaded is not None and offloaded.state is not None
    if isinstance(worker, ModelWorker) and has_weights(worker.engine) and not away:
        copies.reserve(_counted(worker.engine.state_shards()[0], 0))


def _counted(shards: Iterable[Shard], part: int) -> list[Shard]:
    """The shards that a rank writes; what a worker keeps besides its model every rank has, and the first one writes."""
    return [s for s in shards if s.main and s.tensor.numel() and not (part and s.name.startswith(KEPT))]


Place = tuple[str, tuple[int, ...], bool]


def _place(shard: Shard) -> Place:
    """What tells a shard from others of its worker and rank, and the kind of memory that its copy is in."""
    return shard.name, tuple(shard.offset), shard.tensor.is_cuda


def _is_like(memory: Tensor, tensor: Tensor) -> bool:
    return (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype)


def _memory_for(shape: tuple[int, ...], kind: dtype, *, pinned: bool) -> Tensor:
    import torch

    return torch.empty(shape, dtype=kind, pin_memory=pinned)


def _wait_for_devices(shards: Iterable[Shard]) -> None:
    """Return when copies from devices are done."""
    import torch

    for device in {s.tensor.device for s in shards if s.tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
