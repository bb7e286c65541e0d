"""Weights in memory that a server reads as a safetensors file: one copy, which has no name in the file system."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...runtime.transfer.slots import HostMemory

_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_ALIGNED = 8


class WeightFile:
    """``WeightFile(weights)``: copies of tensors by name, as ``views`` into the memory of a file at ``path``.

    It is gone with this object, and with this process, however that ends. A server of the same user on the same host
    can open it.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        # Largest numbers first: the parts of such a file lie without gaps, and each has to be aligned.
        ordered = sorted(weights.items(), key=lambda item: -item[1].element_size())
        table: dict[str, dict[str, object]] = {}
        self.size = 0
        for name, weight in ordered:
            kind = _KINDS[str(weight.dtype).removeprefix("torch.")]
            ends = [self.size, self.size + weight.nbytes]
            table[name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": ends}
            self.size = ends[1]
        head = json.dumps(table).encode()
        head = head.ljust(-(-len(head) // _ALIGNED) * _ALIGNED)
        self._memory = HostMemory()
        self._bytes = self._memory.make(8 + len(head) + self.size)
        self._bytes[: 8 + len(head)].numpy()[:] = bytearray(len(head).to_bytes(8, "little") + head)
        self.views: dict[str, Tensor] = {}
        begin = 8 + len(head)
        for name, weight in ordered:
            part = self._bytes[begin : begin + weight.nbytes]
            self.views[name] = part.view(weight.dtype).view(weight.shape).copy_(weight)
            begin += weight.nbytes

    def empty(self) -> None:
        """Give the memory back to the system: the file is zeros until all of it is written again."""
        self._memory.empty(self._bytes)

    @property
    def path(self) -> Path:
        """Where a process of the same user finds it."""
        process, file, *_ = self._memory.tell(self._bytes)
        return Path(f"/proc/{process}/fd/{file}")
