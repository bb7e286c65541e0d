"""A continuous batch in time: rows enter as others leave, and a token takes the longer the more rows run.

The roofline prices a generate with it, and the simulator's virtual clock has its generates share one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Engine:
    """How fast an engine is: ``Engine(slots=256, step=lambda rows: 0.01 + 1e-5 * rows, prefill=1e-5, prompt=512)``.

    ``slots`` rows run at once, at most. ``step``: seconds of one token of each of so many running rows. ``prefill``:
    seconds for one token of a prompt, in which nobody else goes on; ``prompt``: tokens of a prompt that a row brings.
    ``beside``: by rows that run, the part of these seconds that their tokens hide. ``again``: of a
    token that is computed again, where that differs. ``call``: seconds that a call takes whatever it asks for.
    """

    slots: int
    step: Callable[[int], float]
    prefill: float = 0.0
    prompt: float = 0.0
    again: float | None = None
    call: float = 0.0
    beside: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """A row is sampled in so many turns of equal length, between which it waits: ``Turns(count=4, seconds=1.5)``.

    ``seconds`` is what its environment takes between two turns. The row has no slot meanwhile.
    """

    count: int
    seconds: float

    @property
    def waits(self) -> float:
        """Seconds that a row waits in all."""
        return (self.count - 1) * self.seconds


@dataclass(frozen=True, slots=True)
class _Later:
    """What a row does behind its turn: how many more there are, and the tokens that it has from those before.

    ``seconds`` it waits before each. ``again``: its keys and values are to be computed again when it comes back.
    """

    turns: int
    seconds: float
    before: float = 0.0
    again: bool = False


class Moved(NamedTuple):
    """Rows of one key that entered and left at a time: ``Moved(key, time=3.5, entered=0, left=2)``."""

    key: Hashable
    time: float
    entered: int
    left: int


class ContinuousBatch:
    """Rows that share the slots of an engine; they enter in the order in which they came.

    The time of a token changes when rows enter or leave. So rows are kept by the *token* at which they end, counted
    from the first token that the engine made.

    >>> batch = ContinuousBatch(Engine(slots=2, step=lambda rows: float(rows)))
    >>> batch.submit("call", [3, 1, 1])
    >>> [moved.time for moved in batch.advance(100.0) if moved.left]
    [2.0, 4.0, 5.0]
    """

    def __init__(self, engine: Engine, time: float = 0.0) -> None:
        self.engine = engine
        self.time: float = time  # of what has happened last
        self._token: float = 0.0  # tokens that each running row could have made so far
        self._stalled: float = 0.0  # seconds in which no token is made: prompts, and a publish
        self._active: int = 0  # slots that are taken
        self._waiting: deque[tuple[float, int, Hashable, _Later | None]] = deque()  # tokens, slots, key
        # Last token, number, slots, key, tokens; then those between two turns: when they come back, number, tokens ...
        self._running: list[tuple[float, int, int, Hashable, float, _Later | None]] = []
        self._away: list[tuple[float, int, float, int, Hashable, _Later]] = []
        self._number: int = 0
        self._steps: dict[int, float] = {}
        self._ahead: tuple[ContinuousBatch, list[Moved]] | None = None  # what until() has looked ahead to

    def submit(
        self,
        key: Hashable,
        tokens: Iterable[float],
        weights: Iterable[int] | None = None,
        *,
        call: bool = True,
        turns: Turns | None = None,
    ) -> None:
        """Put rows of so many tokens behind those that wait. A row of a weight stands for so many equal ones.

        ``call``: they begin a call, rather than to be further rows of one. ``turns`` in which they are sampled; else
        one.
        """
        self._stalled += self.engine.call if call else 0.0
        count, later = 1, None
        if turns is not None and turns.count > 1:
            count, later = turns.count, _Later(turns.count - 1, turns.seconds)
        if weights is None:
            self._waiting.extend([(t / count, 1, key, later) for t in tokens])
        else:
            self._waiting.extend([(t / count, w, key, later) for t, w in zip(tokens, weights, strict=True)])
        self._ahead = None

    def use(self, engine: Engine) -> None:
        """Go on at the speed of another engine."""
        if engine is not self.engine:
            self.engine = engine
            self._steps = {}
            self._ahead = None

    def stall(self, seconds: float) -> None:
        """Have running rows stand still for so long from now on."""
        if self._running:
            self._stalled += seconds
            self._ahead = None

    def interrupt(self) -> None:
        """Have keys and values of running rows computed again: of their prompts, and of the tokens that they have.

        Those of rows between two turns are when these come back.
        """
        for ends, _, weight, _, tokens, later in self._running:
            made = tokens - (ends - self._token) + (later.before if later is not None else 0.0)
            self._stalled += weight * self._again * (self.engine.prompt + made)
        away = self._away
        self._away = [(back, n, t, w, key, replace(later, again=True)) for back, n, t, w, key, later in away]
        self._ahead = None

    @property
    def _again(self) -> float:
        """Seconds of a token whose keys and values are computed again."""
        return self.engine.prefill if self.engine.again is None else self.engine.again

    def until(self, wanted: Callable[[Moved], bool]) -> float:
        """Return when something of this kind happens, if nothing comes between; inf where it never does.

        ``wanted`` is asked about all that happens before, in order.
        """
        then = copy(self)
        then._waiting, then._running, then._away = deque(self._waiting), list(self._running), list(self._away)
        passed: list[Moved] = []
        for moved in then._go(inf):
            passed += moved
            if any([wanted(each) for each in moved]):
                self._ahead = then, passed
                return then.time
        return inf

    def looked_ahead(self, time: float) -> bool:
        """Whether :meth:`until` found this time, and nothing has come between."""
        return self._ahead is not None and self._ahead[0].time == time

    def advance(self, time: float) -> list[Moved]:
        """Go on to a time; return what entered and left on the way, in order."""
        if self._ahead is not None and self.looked_ahead(time):
            then, passed = self._ahead
            self.time, self._token, self._stalled, self._active = then.time, then._token, then._stalled, then._active
            self._waiting, self._running, self._away = then._waiting, then._running, then._away
            self._number = then._number
            self._ahead = None
            return passed
        passed = [each for moved in self._go(time) for each in moved]
        if time < inf:
            self.time = max(self.time, time)
        return passed

    def _go(self, until: float) -> Iterator[list[Moved]]:
        """What happens at each moment in which rows enter or leave."""
        if moved := self._enter():
            yield moved
        running, away = self._running, self._away
        while running or away:
            back = away[0][0] if away else inf
            if self._passes(until if until < back else back):
                if back > until:
                    return
                if moved := self._come_back():
                    yield moved
                continue
            ends, _, weight, key, tokens, later = heapq.heappop(running)
            self._active -= weight
            if later is None and (not running or running[0][0] > ends):  # one row alone, as a rule
                moved = [Moved(key, self.time, 0, 1)]
            else:
                moved = self._leave_together([(weight, key, tokens, later)], ends)
            yield moved + self._enter() if self._waiting else moved

    def _passes(self, end: float) -> bool:
        """Go on to when the next rows have made their last token, unless it is ``end`` before; say whether it is."""
        if not self._running:
            self.time = max(self.time, end)
            return True
        if self._stalled > 0:
            stalled = min(self._stalled, end - self.time)
            self._stalled -= stalled
            self.time += stalled
            if self._stalled > 0:
                return True
        step, ends = self._step(), self._running[0][0]
        then = self.time + (ends - self._token) * step
        if then > end:
            self._token += (end - self.time) / step
            self.time = end
            return True
        self.time, self._token = then, ends
        return False

    def _leave_together(self, gone: list[tuple[int, Hashable, float, _Later | None]], ends: float) -> list[Moved]:
        """Take out further rows whose last token is made; all of these leave, for good or for a time."""
        left: dict[Hashable, int] = {}
        while self._running and self._running[0][0] <= ends:
            _, _, weight, key, tokens, later = heapq.heappop(self._running)
            self._active -= weight
            gone.append((weight, key, tokens, later))
        for weight, key, tokens, later in gone:
            if later is None or not later.turns:
                left[key] = left.get(key, 0) + 1
                continue
            self._number += 1
            after = _Later(later.turns - 1, later.seconds, later.before + tokens)
            heapq.heappush(self._away, (self.time + later.seconds, self._number, tokens, weight, key, after))
        return [Moved(key, self.time, 0, count) for key, count in left.items()]

    def _come_back(self) -> list[Moved]:
        """Have rows whose environment has answered wait for a slot, behind those that do."""
        while self._away and self._away[0][0] <= self.time:
            _, _, tokens, weight, key, later = heapq.heappop(self._away)
            self._waiting.append((tokens, weight, key, later))
        return self._enter()

    def _enter(self) -> list[Moved]:
        """Give free slots to those that wait; an empty engine takes a row of any weight. Returns those that are new."""
        entered: dict[Hashable, int] = {}
        while self._waiting and (self._active + self._waiting[0][1] <= self.engine.slots or not self._active):
            tokens, weight, key, later = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._token + tokens, self._number, weight, key, tokens, later))
            hidden = self.engine.beside(self._active) if self.engine.beside is not None else 0.0
            self._active += weight
            if later is None or not later.before:
                self._stalled += self.engine.prefill * self.engine.prompt * weight * (1 - hidden)
                entered[key] = entered.get(key, 0) + 1
            elif later.again:
                self._stalled += weight * self._again * (self.engine.prompt + later.before)
        return [Moved(key, self.time, count, 0) for key, count in entered.items()]

    def _step(self) -> float:
        if self._active not in self._steps:
            self._steps[self._active] = self.engine.step(self._active)
        return self._steps[self._active]


def between_points(step: Callable[[int], float]) -> Callable[[int], float]:
    """Return a step that is exact up to 16 rows and at eight points of each doubling, and a line between them."""
    known: dict[int, float] = {}

    def at(rows: int) -> float:
        if rows not in known:
            known[rows] = step(rows)
        return known[rows]

    def line(rows: int) -> float:
        apart = 1 << max(0, rows.bit_length() - 4)
        low = rows // apart * apart
        if low == rows:
            return at(rows)
        return at(low) + (at(low + apart) - at(low)) * (rows - low) / apart

    return line


def seconds_of(
    engine: Engine, tokens: Iterable[float], weights: Iterable[int] | None = None, turns: Turns | None = None
) -> float:
    """Return the seconds until all rows have left, where nobody else is in the engine."""
    batch = ContinuousBatch(engine)
    batch.submit("", tokens, weights, turns=turns)
    batch.advance(inf)
    return batch.time
