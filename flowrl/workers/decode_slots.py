"""Which share of an engine's decode slots the sessions of a rollout have used.

An engine of so many sessions has a slot for each of them in each of its steps. A slot is used where its session gets a
token; it is not where the session waits for its environment, is computing its prompt, or is over.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
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

    def add(self, counts: Iterable[EngineSlots]) -> None:
        """Add what processes have counted at the same time: those of one engine share its steps.

        >>> slots = DecodeSlots()
        >>> slots.add([EngineSlots("actor", 2, 30, sessions=4, first=0, last=10), EngineSlots("actor", 2, 9, 3, 0, 5)])
        >>> slots
        DecodeSlots(used=39, there=70)
        """
        engines: dict[tuple[str, int | None], list[EngineSlots]] = {}
        for each in counts:
            engines.setdefault((each.policy, each.rank), []).append(each)
        for parts in engines.values():
            steps = max(part.last for part in parts) - min(part.first for part in parts)
            sessions = sum(part.sessions for part in parts)
            self.used += sum(part.used for part in parts)
            self.there += steps * min(sessions, parts[0].most_rows or sessions)


@dataclass(frozen=True)
class EngineSlots:
    """What the sessions of a process had of one engine: ``EngineSlots("actor", 2, 40, sessions=8, first=0, last=9)``.

    ``rank`` is that of the engine; None: the process of the sessions. ``first`` and ``last`` count the engine's steps,
    as they began and when they were through. ``most_rows`` is the engine's.
    """

    policy: str
    rank: int | None
    used: int
    sessions: int
    first: int
    last: int
    most_rows: int | None = None


_COUNTS: ContextVar[list[EngineSlots] | None] = ContextVar("flowrl_decode_slots", default=None)


@contextmanager
def counted() -> Generator[list[EngineSlots]]:
    """Count the rollouts inside, in the list that it gives."""
    counts: list[EngineSlots] = []
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


@contextmanager
def counted_in(slots: DecodeSlots) -> Generator[None]:
    """Have the rollouts inside be counted in ``slots``, once they are over."""
    with counted() as counts:
        try:
            yield
        finally:
            slots.add(counts)


def count_slots(counts: Iterable[EngineSlots]) -> None:
    """Count slots of the rollout of this call, in its thread."""
    if (here := _COUNTS.get()) is not None:
        here.extend(counts)
