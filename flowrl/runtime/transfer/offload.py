"""Weights and optimizer state that leave the memory of a device for another worker, and come back before a call."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ...workers.engine import HasWeights


@dataclass
class Offloaded:
    """Memory that was given back to a device. What was in it lies in host memory, or for the host in a file.

    Storages are emptied and filled again, so that every tensor and view on them stays what it was.
    """

    kept: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])  # a storage, and its bytes elsewhere
    bytes: int = 0

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Empty the storages behind these tensors. Returns the bytes that this frees."""
        import torch

        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            self.kept.append((storage, _copy_elsewhere(here)))
            self.bytes += size
        for storage, _ in self.kept:
            storage.resize_(0)
        return self.bytes

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


def tensors_of(engine: HasWeights) -> Iterable[Tensor]:
    """Return all tensors that an engine holds on its device: weights, and what trains them."""
    shards, _ = engine.state_shards()
    return [shard.tensor for shard in (*shards, *engine.shards())]
