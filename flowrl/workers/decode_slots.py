"""Which share of an engine's decode slots the sessions of a rollout have used.

An engine of so many sessions has a slot for each of them in each of its steps. A slot is used where its session gets a
token; it is not where the session waits for its environment, is computing its prompt, or is over.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeGuard


class CountsSlots(Protocol):
    """An engine each of whose steps is a token of each row; at most ``most_rows`` of them, None: of all."""

    @property
    def most_rows(self) -> int | None: ...


def counts_slots(engine: object) -> TypeGuard[CountsSlots]:
    """Return whether steps of an engine are tokens: rows of another one run by themselves."""
    return hasattr(engine, "most_rows")


@dataclass
class DecodeSlots:
    """Slots that were there, and those that were used.

    >>> DecodeSlots(used=6, there=8).share
    0.75
    """

    used: int = 0
    there: int = 0

    @property
    def share(self) -> float | None:
        """The share that was used; None where nothing was counted."""
        return self.used / self.there if self.there else None


_COUNT: ContextVar[DecodeSlots | None] = ContextVar("flowrl_decode_slots", default=None)


@contextmanager
def counted_in(slots: DecodeSlots) -> Generator[None]:
    """Have the rollouts inside be counted in ``slots``."""
    token = _COUNT.set(slots)
    try:
        yield
    finally:
        _COUNT.reset(token)


def count_slots(used: int, there: int) -> None:
    """Count slots of the rollout of this call, in its thread."""
    if (slots := _COUNT.get()) is not None:
        slots.used += used
        slots.there += there
