"""Weights and optimizer state that leave the memory of a device for others, and come back before they are needed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import RunError
from ..engine import has_weights, sleeps
from ..model_worker import ModelWorker

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import ShardedState, Worker
    from .weight_boxes import Shard


@dataclass
class Offloaded:
    """Memory that was given back to a device. What was in it lies in host memory, or for the host in a file.

    Storages are emptied and filled again, so that every tensor and view on them stays what it was. ``state`` is that of
    the engine whose they are, from before: no views can be made on a storage that is empty.
    """

    state: ShardedState | None = None
    kept: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])  # a storage, and its bytes elsewhere
    bytes: int = 0

    @classmethod
    def of(cls, state: ShardedState, weights: Iterable[Shard]) -> Offloaded:
        """Take all that an engine holds out of the memory of its device: its state, and weights that are not in it."""
        found = cls(state)
        found.take(shard.tensor for shard in (*state[0], *weights))
        return found

    def take(self, tensors: Iterable[Tensor], shared: Callable[[], None] | None = None) -> int:
        """Empty the storages behind these tensors. Returns the bytes that this frees.

        ``shared`` empties the memory among them that other processes have open. Raises RunError, with all as it was,
        for such memory without it.
        """
        import torch

        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or storage.data_ptr() in seen:
                continue
            if not storage.resizable() and shared is None:
                self.kept.clear()
                raise stays()
            seen.add(storage.data_ptr())
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            self.kept.append((storage, _copy_elsewhere(here)))
            self.bytes += size
        for storage, _ in self.kept:
            if storage.resizable():
                storage.resize_(0)
        if shared is not None:
            shared()
        return self.bytes

    def finder(self) -> Callable[[Tensor], Tensor | None]:
        """Return what finds a tensor that was taken as it lies elsewhere, where nobody ever writes; else None."""
        import torch

        places = {storage._cdata: bytes_ for storage, bytes_ in self.kept}

        def find(tensor: Tensor) -> Tensor | None:
            bytes_ = places.get(tensor.untyped_storage()._cdata)
            if bytes_ is None:
                return None
            view = (bytes_.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            return torch.empty(0, dtype=tensor.dtype).set_(*view)  # type: ignore[call-overload]

        return find

    def bring_back(self) -> int:
        """Fill them again. Returns the bytes that this takes."""
        import torch

        for storage, bytes_ in self.kept:
            if storage.resizable():
                storage.resize_(bytes_.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(bytes_)  # type: ignore[call-overload]
        self.kept.clear()
        size, self.bytes = self.bytes, 0
        return size


def _copy_elsewhere(here: Tensor) -> Tensor:
    """Return a copy of bytes: of a device in pinned memory, of the host in a file that is gone when nobody has it."""
    import torch

    if here.device.type == "cpu":
        with tempfile.NamedTemporaryFile(prefix="flowrl-") as file:
            there = torch.from_file(file.name, shared=True, size=here.numel(), dtype=torch.uint8)
    else:
        there = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
    return there.copy_(here)


def sleep(worker: Worker) -> int:
    """Have a worker's engine leave the memory of its device. Returns the bytes that this frees; 0 without weights.

    Raises RunError for an engine that has weights and does not sleep.
    """
    if not isinstance(worker, ModelWorker) or not has_weights(worker.engine):
        return 0
    if not sleeps(worker.engine):
        raise stays()
    return worker.engine.sleep()


def wake(worker: Worker) -> int:
    """Have it take the memory back. Returns the bytes that this takes; 0 where it was awake."""
    return worker.engine.wake() if isinstance(worker, ModelWorker) and sleeps(worker.engine) else 0


def offloaded_of(worker: Worker) -> Offloaded | None:
    """Return what a worker's engine has out of memory while it sleeps; None where it is awake."""
    return getattr(worker.engine, "offloaded", None) if isinstance(worker, ModelWorker) else None


def stays() -> RunError:
    """The error of weights that cannot leave their memory."""
    return RunError(
        "weights that another process reads cannot leave their memory for another worker of the pool.",
        fix="Place the worker whose engine that is in a pool of its own.",
    )
