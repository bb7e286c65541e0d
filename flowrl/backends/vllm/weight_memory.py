"""The parameters of a rank of vLLM in memory that its process reads in place, and which box of a weight lies where.

One copy, which has no name in the file system. Who moves weights writes their boxes straight into vLLM's parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...placement.model.rank_parameters import Parameter
from ...runtime.transfer.slots import HostMemory
from ...workers.weights.weight_boxes import Box, Shard

_ALIGNED = 64  # bytes from which a parameter begins


class WeightMemory:
    """``WeightMemory(parameters, torch.float32)``: memory for parameters as vLLM has them, zeros at first.

    ``others``: names and boxes of weights that count on another rank, which has the same. ``shards`` are the boxes of
    weights as views on it; ``told`` is what :func:`open_weights` needs. The memory is gone with the processes that have
    it open, however they end.
    """

    def __init__(
        self, parameters: Sequence[Parameter], dtype: torch.dtype, others: Container[tuple[str, Box]] = ()
    ) -> None:
        table: list[list[Any]] = []
        size = 0
        for one in parameters:
            parts = [[part.name, part.shape, part.box, part.at] for part in one.parts]
            table.append([one.name, one.shape, size, parts])
            count = torch.Size(one.shape).numel() * dtype.itemsize
            size += -(-count // _ALIGNED) * _ALIGNED
        self._memory = memory = HostMemory()
        self._bytes = memory.make(max(size, 1))
        kind = str(dtype).removeprefix("torch.")
        self.told: dict[str, Any] = {"memory": memory.tell(self._bytes), "dtype": kind, "table": table}
        views = boxes_of(_parameters(self._bytes, self.told), self.told)
        self.shards = [replace(shard, main=(shard.name, shard.box) not in others) for shard in views]
        self.size = sum(shard.tensor.nbytes for shard in self.shards)

    def empty(self) -> None:
        """Give the memory back to the system: the parameters are zeros until they are written again."""
        self._memory.empty(self._bytes)


def open_weights(told: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor], list[Shard]]:
    """Return the memory of another process, the parameters in it by name, and the boxes of weights as views on them.

    Raises OSError where it cannot be opened.
    """
    memory = HostMemory().open(told["memory"])
    parameters = _parameters(memory, told)
    return memory, parameters, list(boxes_of(parameters, told))


def boxes_of(parameters: Mapping[str, Tensor], told: Mapping[str, Any]) -> Iterator[Shard]:
    """Yield the boxes of weights as views on parameters."""
    for name, _, _, parts in told["table"]:
        for weight, shape, box, at in parts:
            view = parameters[name][tuple(slice(a, b) for a, b in at)]
            yield Shard(weight, tuple(shape), tuple(a for a, _ in box), view)


def _parameters(memory: Tensor, told: Mapping[str, Any]) -> dict[str, Tensor]:
    dtype, found = getattr(torch, told["dtype"]), dict[str, Tensor]()
    for name, shape, begin, _ in told["table"]:
        size = dtype.itemsize * torch.Size(shape).numel()
        found[name] = memory[begin : begin + size].view(dtype).view(shape)
    return found
