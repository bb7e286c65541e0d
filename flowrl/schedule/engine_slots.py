"""The generates of a pool in one continuous batch: when their rows enter, when groups and calls are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from ..placement.cost.continuous_batch import ContinuousBatch, Engine, Moved, Turns
from .events import Entered, Finished, Grouped

_Key = tuple[int, int]  # a call and its chunk


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of each row of a generate, by prompt group, how fast its engine is, and the turns of its episodes."""

    groups: Sequence[Sequence[float]]
    engine: Engine
    turns: Turns | None = None

    def chunk(self, number: int, chunks: int) -> Sequence[tuple[int, Sequence[float]]]:
        """Return the prompt groups of a chunk, each with its number."""
        size = -(-len(self.groups) // chunks)
        return list(enumerate(self.groups[number * size : (number + 1) * size], number * size))


@dataclass(slots=True)
class _Left:
    """What is left of a chunk: rows that wait for the engine, rows that have not ended, those of each group."""

    waiting: int
    rows: int
    groups: dict[int, int]
    windowed: bool

    def copy(self) -> _Left:
        return _Left(self.waiting, self.rows, dict(self.groups), self.windowed)

    def take(self, key: tuple[int, int, int], moved: Moved) -> list[Entered | Grouped | Finished]:
        """Count rows that have moved; return what is to be told of it."""
        call, chunk, group = key
        self.waiting -= moved.entered
        self.rows -= moved.left
        self.groups[group] -= moved.left
        told: list[Entered | Grouped | Finished] = []
        if moved.left and not self.groups[group] and self.windowed:
            told.append(Grouped(call, group))
        if not self.rows:
            told.append(Finished(call, chunk))
        elif moved.entered and not self.waiting:
            told.append(Entered(call))
        return told


@dataclass
class EngineSlots:
    """One engine, at the time that its rows have come to."""

    batch: ContinuousBatch
    first: dict[_Key, float] = field(default_factory=dict[_Key, float])  # when the first row of a chunk entered
    _left: dict[_Key, _Left] = field(default_factory=dict[_Key, "_Left"])
    _ahead: _Passed | None = None  # what next() has looked ahead to

    @staticmethod
    def of(rows: Rows) -> EngineSlots:
        """Return an empty engine that is as fast as one of these rows."""
        return EngineSlots(ContinuousBatch(rows.engine))

    def submit(self, key: _Key, rows: Rows, chunks: int, *, windowed: bool) -> None:
        """Put the rows of a chunk of a call behind those that wait; ``windowed`` ones are told of by groups."""
        self.batch.use(rows.engine)
        groups = rows.chunk(key[1], chunks)
        if not windowed:  # nobody is told of a group, so that all are one
            groups = [(0, [tokens for _, group in groups for tokens in group])]
        count = sum(len(group) for _, group in groups)
        self._left[key] = _Left(count, count, {number: len(group) for number, group in groups}, windowed)
        for place, (number, group) in enumerate(groups):
            self.batch.submit((*key, number), group, call=not place, turns=rows.turns)

    def advance(self, time: float) -> list[Entered | Grouped | Finished]:
        """Go on to a time; return what the schedule has to know of the way."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self.batch.looked_ahead(time):
            self.batch.advance(time)
            passed, self._left = ahead, ahead.left
        else:
            passed = _Passed(self._left)
            for moved in self.batch.advance(time):
                passed.take(moved)
        for key, at in passed.first.items():
            self.first.setdefault(key, at)
        return passed.told

    def next(self) -> float:
        """Return when there is something to tell, if nothing comes between."""
        ahead = _Passed({key: each.copy() for key, each in self._left.items()})
        time = self.batch.until(ahead.take)
        self._ahead = ahead if time < inf else None
        return time


@dataclass(slots=True)
class _Passed:
    """What rows have come to on the way to a time."""

    left: dict[_Key, _Left]
    first: dict[_Key, float] = field(default_factory=dict[_Key, float])
    told: list[Entered | Grouped | Finished] = field(default_factory=list["Entered | Grouped | Finished"])

    def take(self, moved: Moved) -> bool:
        """Count rows that have moved; return whether there is something to tell of it."""
        key = _key(moved)
        chunk = key[:2]
        left = self.left[chunk]
        if moved.entered:
            self.first.setdefault(chunk, moved.time)
        elif left.rows > moved.left and not left.windowed:  # of which nobody has to know
            left.rows -= moved.left
            return False
        told = left.take(key, moved)
        if not left.rows:
            del self.left[chunk]
        self.told += told
        return bool(told)


def _key(moved: Moved) -> tuple[int, int, int]:
    key = moved.key
    assert isinstance(key, tuple), "rows of a call have its number, its chunk and their group"
    return key  # type: ignore[return-value]
