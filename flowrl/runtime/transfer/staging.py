"""The memory in which messages are put together: a few buffers of one size, made once and used again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Staging:
    """``Staging(torch.device("cpu"), most=4)`` gives at most ``most`` buffers at a time, each of the size last asked.

    ``bytes`` is what all of them take; they stay from move to move, as new memory costs more than what is copied into
    it. ``pinned``: host memory that is copied to and from a device. ``make``: gives a buffer of so many bytes, where it
    is to be a special one.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        most: int = 4,
        pinned: bool = False,
        make: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.device, self._most, self._pinned, self._make = device, most, pinned, make
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
        buffer = self._free.pop() if self._free else self._new()
        self._out += 1
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._out -= 1
        self._free.append(buffer)

    def _new(self) -> Tensor:
        if self._make is not None:
            return self._make(self._size)
        return torch.empty(self._size, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def drop(self) -> None:
        """Let go of all buffers; those in use are not taken back any more."""
        self._free, self._out = [], 0
