"""A continuous batch in time: rows enter as others leave, and a token takes the longer the more rows run.

The roofline prices a generate with it, and the simulator's virtual clock has its generates share one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
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
        self._waiting: deque[tuple[float, int, Hashable]] = deque()  # tokens, slots, key
        self._running: list[tuple[float, int, int, Hashable, float]] = []  # last token, number, slots, key, tokens
        self._number: int = 0
        self._steps: dict[int, float] = {}
        self._ahead: tuple[ContinuousBatch, list[Moved]] | None = None  # what until() has looked ahead to

    def submit(
        self, key: Hashable, tokens: Iterable[float], weights: Iterable[int] | None = None, *, call: bool = True
    ) -> None:
        """Put rows of so many tokens behind those that wait. A row of a weight stands for so many equal ones.

        ``call``: they begin a call, rather than to be further rows of one.
        """
        self._stalled += self.engine.call if call else 0.0
        if weights is None:
            self._waiting.extend([(t, 1, key) for t in tokens])
        else:
            self._waiting.extend([(t, w, key) for t, w in zip(tokens, weights, strict=True)])
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
        """Have keys and values of running rows computed again: of their prompts, and of the tokens that they have."""
        each = self.engine.prefill if self.engine.again is None else self.engine.again
        for ends, _, weight, _, tokens in self._running:
            made = tokens - (ends - self._token)
            self._stalled += weight * each * (self.engine.prompt + made)
        self._ahead = None

    def until(self, wanted: Callable[[Moved], bool]) -> float:
        """Return when something of this kind happens, if nothing comes between; inf where it never does.

        ``wanted`` is asked about all that happens before, in order.
        """
        then = copy(self)
        then._waiting, then._running = deque(self._waiting), list(self._running)
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
            self._waiting, self._running, self._number = then._waiting, then._running, then._number
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
        while self._running:
            if self._stalled > 0:
                stalled = min(self._stalled, until - self.time)
                self._stalled -= stalled
                self.time += stalled
                if self._stalled > 0:
                    return
            step, ends = self._step(), self._running[0][0]
            then = self.time + (ends - self._token) * step
            if then > until:
                self._token += (until - self.time) / step
                self.time = until
                return
            self.time, self._token = then, ends
            running = self._running
            _, _, weight, key, _ = heapq.heappop(running)
            self._active -= weight
            if not running or running[0][0] > ends:  # one row alone, as a rule
                moved = [Moved(key, then, 0, 1)]
            else:
                moved = self._with_others(key, then, ends)
            yield moved + self._enter() if self._waiting else moved

    def _with_others(self, key: Hashable, time: float, ends: float) -> list[Moved]:
        """Further rows that leave with one of this key."""
        left, running = {key: 1}, self._running
        while running and running[0][0] <= ends:
            _, _, weight, key, _ = heapq.heappop(running)
            self._active -= weight
            left[key] = left.get(key, 0) + 1
        return [Moved(key, time, 0, count) for key, count in left.items()]

    def _enter(self) -> list[Moved]:
        """Give free slots to those that wait; an empty engine takes a row of any weight."""
        entered: dict[Hashable, int] = {}
        while self._waiting and (self._active + self._waiting[0][1] <= self.engine.slots or not self._active):
            tokens, weight, key = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._token + tokens, self._number, weight, key, tokens))
            hidden = self.engine.beside(self._active) if self.engine.beside is not None else 0.0
            self._active += weight
            self._stalled += self.engine.prefill * self.engine.prompt * weight * (1 - hidden)
            entered[key] = entered.get(key, 0) + 1
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


def seconds_of(engine: Engine, tokens: Iterable[float], weights: Iterable[int] | None = None) -> float:
    """Return the seconds until all rows have left, where nobody else is in the engine."""
    batch = ContinuousBatch(engine)
    batch.submit("", tokens, weights)
    batch.advance(inf)
    return batch.time
