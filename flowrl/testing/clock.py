"""Clocks of a fake engine: one on which time passes when it is told so, and the real one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a fake engine takes its time from."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class VirtualClock:
    """A clock that stands still but for what is slept on it, which takes no time.

    >>> clock = fl.testing.VirtualClock()
    >>> clock.sleep(3600)
    >>> clock.now()
    3600.0
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Return the seconds that were slept."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Go on by so many seconds, at once."""
        self._now += seconds


class RealClock:
    """The clock of the machine.

    >>> clock = fl.testing.RealClock()
    >>> before = clock.now()
    >>> clock.sleep(0.001)
    >>> clock.now() - before >= 0.001
    True
    """

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        time.sleep(seconds)
