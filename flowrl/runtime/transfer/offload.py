"""Weights and optimizer state that leave the memory of a device for another worker, and come back before a call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from ...workers.base import ShardedState
    from ...workers.engine import HasWeights


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
    def of(cls, engine: HasWeights) -> Offloaded:
        """Take all that an engine holds out of the memory of its device: weights, and what trains them."""
        found = cls(engine.state_shards())
        assert found.state is not None, "it was just given"
        found.take(shard.tensor for shard in (*found.state[0], *engine.shards()))
        return found

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Empty the storages behind these tensors. Returns the bytes that this frees.

        Raises RunError, with all as it was, for memory that another process reads, as vLLM's does.
        """
        import torch

        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or storage.data_ptr() in seen:
                continue
            if not storage.resizable():
                self.kept.clear()
                raise RunError(
                    "weights that another process reads cannot leave their memory for another worker of the pool.",
                    fix="Place the worker whose engine that is in a pool of its own.",
                )
            seen.add(storage.data_ptr())
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            self.kept.append((storage, _copy_elsewhere(here)))
            self.bytes += size
        for storage, _ in self.kept:
            storage.resize_(0)
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
