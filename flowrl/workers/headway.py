"""How far this process has come: a count that grows with every pass of a model, row of user code and block of weights.

A run in which nobody's count grows has come to a standstill (:mod:`flowrl.runtime.driver.monitoring.hang_watch`).
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Headway(NamedTuple):
    """How far a process has come: ``Headway(1780, 12.5)``. ``seconds`` are those of its processors."""

    count: int
    seconds: float


class _Process:
    count = 0


def make_headway() -> None:
    """Note that something was done. It is cheap, and threads may call it; a count that is lost between two is none."""
    _Process.count += 1


def headway() -> Headway:
    """Return how far this process has come."""
    return Headway(_Process.count, time.process_time())
