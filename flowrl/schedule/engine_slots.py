"""When the rows of a generate enter an engine that runs so many at once, and when they leave it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Seconds of each row, by prompt group, and how many rows the engine runs at once."""

    groups: Sequence[Sequence[float]]
    slots: int

    def chunk(self, number: int, chunks: int) -> Sequence[tuple[int, Sequence[float]]]:
        """Return the prompt groups of a chunk, each with its number."""
        size = -(-len(self.groups) // chunks)
        return list(enumerate(self.groups))[number * size : (number + 1) * size]


@dataclass(frozen=True, slots=True)
class Taken:
    """When rows were in an engine: the first entered, the last ``entered``, each group ended, all were ``finished``."""

    first: float
    entered: float
    ends: Sequence[tuple[int, float]]
    finished: float


class EngineSlots:
    """The slots of one engine, each taken until a time."""

    def __init__(self, slots: int) -> None:
        self._until = [0.0] * slots

    def run(self, groups: Sequence[tuple[int, Sequence[float]]], begin: float) -> Taken:
        """Have rows take the slots from ``begin`` on, each the one that is free first."""
        slots, ends = self._until, list[tuple[int, float]]()
        first, entered, finished = float("inf"), begin, begin
        for number, group in groups:
            end = begin
            for seconds in group:
                start = max(begin, heapq.heappop(slots))
                heapq.heappush(slots, start + seconds)
                first, entered, end = min(first, start), max(entered, start), max(end, start + seconds)
            finished = max(finished, end)
            ends.append((number, end))
        return Taken(first, entered, ends, finished)
