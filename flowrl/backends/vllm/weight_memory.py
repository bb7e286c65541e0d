"""Weights in memory that another process reads in place: one copy, which has no name in the file system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime.transfer.slots import HostMemory

_ALIGNED = 64  # bytes from which a weight begins


class WeightMemory:
    """``WeightMemory(weights)``: copies of tensors by name, as ``views``; ``told`` is what :func:`open_weights` needs.

    The memory is gone with the processes that have it open, however they end.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        table: list[list[Any]] = []
        size = 0
        for name, weight in weights.items():
            table.append([name, str(weight.dtype).removeprefix("torch."), list(weight.shape), size])
            size += -(-weight.nbytes // _ALIGNED) * _ALIGNED
        memory = HostMemory()
        self._bytes = memory.make(max(size, 1))
        self.told: dict[str, Any] = {"memory": memory.tell(self._bytes), "table": table}
        self.size = sum(weight.nbytes for weight in weights.values())
        self.views = _views(self._bytes, table)
        for name, weight in weights.items():
            self.views[name].copy_(weight)


def open_weights(told: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of another process by name, in its memory. Raises OSError where it cannot be opened."""
    return _views(HostMemory().open(told["memory"]), told["table"])


def _views(memory: Tensor, table: list[list[Any]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, kind, shape, begin in table:
        dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(shape).numel()
        found[name] = memory[begin : begin + size].view(dtype).view(shape)
    return found
