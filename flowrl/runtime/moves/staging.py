"""The memory in which messages are put together: a few buffers of one size, made once and used again."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """``Staging(torch.device("cpu"), most=4)`` gives at most ``most`` buffers at a time, each of the size last asked.

    ``bytes`` is what all of them take; they stay from move to move, as new memory costs more than what is copied into
    it. ``pinned``: host memory that is copied to and from a device.
    """

    def __init__(self, device: torch.device, *, most: int = 4, pinned: bool = False) -> None:
        self.device, self._most, self._pinned = device, most, pinned
        self._size = self._out = 0
        self._free: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """What the buffers take, those in use and those that wait."""
        return (self._out + len(self._free)) * self._size

    def fit(self, size: int) -> None:
        """Make room for messages of up to ``size`` bytes; nothing may be in use."""
        assert not self._out, "messages are still under way"
        if size > self._size:
            self._free, self._size = [], size

    def take(self) -> Tensor | None:
        """A buffer, or None while all are in use."""
        if not self._free and self._out == self._most:
            return None
        self._out += 1
        if self._free:
            return self._free.pop()
        return torch.empty(self._size, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._out -= 1
        self._free.append(buffer)

    def drop(self) -> None:
        """Let go of all buffers; those in use are not taken back any more."""
        self._free, self._out = [], 0
