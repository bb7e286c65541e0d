"""How long the environments of a rollout kept its sessions away from the engine, between two turns of an episode.

A session is away from when the engine has answered it until it asks the engine for the next turn: while its environment
steps, waits for a thread, or has its answer and waits for those of others which are quick. What comes before the first
turn and behind the last one is not in it, nor what ended in a failure.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class EnvironmentWaits:
    """How often sessions were away, and for how many seconds in all.

    >>> waits = EnvironmentWaits(count=3, seconds=4.0)
    >>> waits.add(EnvironmentWaits(count=1, seconds=2.0))
    >>> waits.mean
    1.5
    """

    count: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        """Seconds of one of them; None where there was none."""
        return self.seconds / self.count if self.count else None

    def add(self, other: EnvironmentWaits) -> None:
        """Add those of other sessions."""
        self.count += other.count
        self.seconds += other.seconds


_WAITS: ContextVar[EnvironmentWaits | None] = ContextVar("flowrl_environment_waits", default=None)


@contextmanager
def waits_counted_in(waits: EnvironmentWaits) -> Generator[EnvironmentWaits]:
    """Have the rollouts inside be counted in ``waits``, which it gives."""
    token = _WAITS.set(waits)
    try:
        yield waits
    finally:
        _WAITS.reset(token)


def count_waits(waits: EnvironmentWaits) -> None:
    """Count those of sessions of the rollout of this call, in its thread."""
    if (here := _WAITS.get()) is not None:
        here.add(waits)
