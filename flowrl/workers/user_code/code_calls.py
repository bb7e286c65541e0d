"""Calls of user code that sessions wait for: plain functions one after another in a thread, async ones in a loop.

Whoever collects the answers waits for calls that are quick, so that what happens next depends on the answers and not on
who was first. It looks at those under way every other millisecond, which is the tick of the scheduler. One that was
there at a look, and waits for something at the next one, is slow: it is left to its thread, and the others go on in
another one. So it holds them up for two ticks at most. A call that computes, or that the machine keeps from computing,
is given fifty looks, so that how busy the machine is does not tell a quick one from a slow one; and so is an async one
while anything in this process does, which may be what it waits for.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from .event_loops import EventLoops
from .failed_rewards import Late
from .printed_output import PRINTING
from .rows_in_progress import Notes, Row
from .run_rows import Steps, called
from .waiting_thread import WaitingProcess, WaitingThread

LOOK = 0.002  # seconds between two looks, at least
_COMPUTES = 0.02  # what a look counts at a call that computes; one at a call that waits is enough
_SLICE = 0.02  # seconds that an answer lies here while others are waited for
_HELD_UP = 0.2  # seconds that an event loop has to end a call by itself
_PATIENT = 10  # times as many where it is not seen to be held up
_THREADS = 256  # that are busy with a slow call each, at most


@dataclass(slots=True, eq=False)
class CodeCall:
    """A call of user code for a session: ``CodeCall(7, step, (state, "up"), row)``.

    ``take`` reads what it returned, and raises where that is wrong. ``outcome`` is what it gave, or its exception, once
    it has ended. One that ``ends`` a session is not given up because the session's time is up: what was played would
    have no grade.
    """

    session: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    row: Row
    take: Callable[[Any], Any] = lambda returned: returned
    is_async: bool = False
    ends: bool = False
    began: float = math.inf
    looks: float = 0.0  # at which it was there, or those of its loop before it was
    has_begun: bool = False  # its code, of an async one
    forgotten: bool = False  # nobody waits for it
    task: asyncio.Task[None] | None = None
    outcome: Any = None

    def run(self) -> Any:
        """Call it here."""
        return self.take(self.fn(*self.args))


class CodeCalls:
    """The calls of all sessions of a rollout: :meth:`begin` some, then :meth:`collect` their answers.

    ``timeout`` is the most seconds of one; with None plain ones run in the thread that begins them. With
    ``stop_at_error`` no plain one is begun after one that failed. Async ones run in ``loops``.
    """

    def __init__(
        self, timeout: float | None, notes: Notes, loops: EventLoops | None = None, *, stop_at_error: bool = False
    ) -> None:
        self.timeout, self.notes, self.event_loops = timeout, notes, loops or EventLoops()
        self._stop_at_error = stop_at_error
        self._looked = 0.0  # when
        self._waiting: deque[CodeCall] = deque()
        self._quick: dict[CodeCall, None] = {}  # under way, and waited for; async ones in their order
        self._slow: dict[CodeCall, None] = {}
        self._ended: list[CodeCall] = []
        self._change = threading.Condition()
        self._hand: _Hand | None = None
        self._busy_hands = 0
        self._loop: _Loop | None = None
        self._loops: list[_Loop] = []
        self._process = WaitingProcess()
        self._closed = False

    def begin(self, calls: Sequence[CodeCall]) -> None:
        """Begin calls, in their order."""
        plain = [call for call in calls if not call.is_async]
        coroutines = [call for call in calls if call.is_async]
        if coroutines:
            self._open_loop().begin(coroutines)
        if plain and self.timeout is None:
            for call in plain:
                call.outcome = called(call.run, self.notes, call.row)
                self._ended.append(call)
                if self._stop_at_error and isinstance(call.outcome, BaseException):
                    break
        elif plain:
            with self._change:
                self._waiting.extend(plain)
                if self._hand is None:
                    self._hand = _Hand(self)
                self._change.notify_all()

    def collect(self, wait: float) -> tuple[list[CodeCall], bool]:
        """Return calls that have ended, and whether quick ones are still under way.

        Where none is quick, it waits ``wait`` seconds at most for another to end.
        """
        began = time.monotonic()
        with self._change:
            while True:
                now = time.monotonic()
                self._look(now)
                quick = bool(self._quick) or self._moves()
                if self._ended and (not quick or now - began >= _SLICE):
                    break
                if not quick and (now - began >= wait or not (self._slow or self._waiting)):
                    break
                until = now + LOOK if quick else began + wait
                if self._slow and self.timeout is not None:
                    until = min(until, next(iter(self._slow)).began + self.timeout)
                self._change.wait(min(max(until - now, 0.0005), 60.0))
            ended, self._ended = self._ended, []
        return ended, quick

    @property
    def under_way(self) -> bool:
        """Whether a call has not ended."""
        with self._change:
            return bool(self._waiting or self._quick or self._slow or self._ended)

    def forget(self, call: CodeCall) -> None:
        """Wait for a call no more; what it gives is left aside."""
        with self._change:
            call.forgotten = True
            self._quick.pop(call, None)
            self._slow.pop(call, None)
            if call in self._waiting:
                self._waiting.remove(call)
            self._ended = [other for other in self._ended if other is not call]
            loop = next((loop for loop in self._loops if call.task is not None and call in loop.calls), None)
        if loop is not None and call.task is not None:
            loop.loop.call_soon_threadsafe(call.task.cancel)

    def close(self) -> None:
        """Begin nothing more, and let threads end once their calls have."""
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()
        loops, self._loops, self._loop = self._loops, [], None
        for loop in loops:
            loop.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _moves(self) -> bool:
        """Whether waiting calls are about to be begun."""
        return bool(self._waiting) and self._hand is not None and (self._hand.call not in self._slow)

    def _look(self, now: float) -> None:
        """Leave calls that are not quick to their threads, and those that took too long altogether."""
        if self._quick and now - self._looked >= LOOK:
            self._leave_slow()
            self._looked = now
        hand = self._hand
        if hand is not None and hand.call in self._slow and self._waiting and self._busy_hands < _THREADS:
            self._busy_hands += 1
            hand.alone = True
            self._hand = _Hand(self)
        if self.timeout is None:
            return
        while self._slow and now - (call := next(iter(self._slow))).began >= self.timeout + _HELD_UP * call.is_async:
            held_up = next((loop.within for loop in self._loops if call in loop.calls and loop.within), None)
            why = "" if held_up is None else "; it waits without await, which stops all others"
            if held_up is not None and held_up[0] is not call:
                why = f"; its loop was held up by {held_up[0].row}, which waits without await"
            self._end(call, Late(self.timeout, why))
            call.forgotten = True

    def _leave_slow(self) -> None:
        """Wait no longer for calls that wait, or have computed for so many looks."""
        slow = [*self._slow_in_hand(), *self._slow_in_loops()]
        if (loop := self._loop) is not None and loop.is_held_up and any(call in loop.calls for call in slow):
            left = {call: None for call in self._quick if call in loop.calls and not call.has_begun}
            loop.calls.difference_update(left)
            self._loop, slow = None, [call for call in slow if call not in left]
            self._quick = {call: None for call in self._quick if call not in left}
            self._open_loop().begin([*left])  # those that it has not come to go on in another one
        for call in slow:
            del self._quick[call]
            self._slow[call] = None

    def _slow_in_hand(self) -> list[CodeCall]:
        """The plain call under way, if others have waited for it long enough."""
        hand = self._hand
        if hand is None or hand.call is None or hand.call not in self._quick:
            return []
        waits = hand.thread.waits()
        if hand.call.began < self._looked:  # it was there at the look before
            hand.call.looks += 1.0 if waits else _COMPUTES
        return [hand.call] if hand.call.looks >= 1.0 else []

    def _slow_in_loops(self) -> list[CodeCall]:
        """The async calls that others have waited for long enough."""
        if not any(call.is_async for call in self._quick):
            return []
        waits = self._process.waits()
        for loop in self._loops:
            loop.look(1.0 if waits else _COMPUTES)
        slow: list[CodeCall] = []
        for call in self._quick:
            loop = next((loop for loop in self._loops if call in loop.calls), None)
            if loop is not None and loop.looks - call.looks < 1.0:
                break  # those behind it began later
            if loop is not None:
                slow.append(call)
        return slow

    def _begun(self, call: CodeCall) -> None:
        call.began = time.monotonic()
        self._quick[call] = None

    def _end(self, call: CodeCall, outcome: Any) -> None:
        if call.forgotten:
            return
        self._quick.pop(call, None)
        self._slow.pop(call, None)
        call.outcome = outcome
        self._ended.append(call)

    def _open_loop(self) -> _Loop:
        if self._loop is None:
            self._loop = _Loop(self)
            self._loops.append(self._loop)
        return self._loop


class _Hand:
    """A thread that works calls off, one after another; ``alone`` with a slow one, it ends after it."""

    def __init__(self, calls: CodeCalls) -> None:
        self._calls = calls
        self.call: CodeCall | None = None
        self.alone = False
        self.thread: WaitingThread  # from its first call on
        whole = copy_context()  # so that what is printed and warned is told to whom that of the op is
        threading.Thread(target=whole.run, args=(self._work,), daemon=True, name="flowrl-env").start()

    def _work(self) -> None:
        self.thread, calls = WaitingThread(), self._calls
        change, ended, outcome = calls._change, None, None
        while True:
            with change:
                if ended is not None:
                    self._end(ended, outcome)
                while not calls._waiting and not calls._closed and not self.alone:
                    change.wait()
                if calls._closed or self.alone:
                    return
                call = self.call = calls._waiting.popleft()
                calls._begun(call)
            ended, outcome = call, called(call.run, calls.notes, call.row)

    def _end(self, call: CodeCall, outcome: Any) -> None:
        calls, self.call = self._calls, None
        calls._end(call, outcome)
        if calls._stop_at_error and isinstance(outcome, BaseException):
            calls._waiting.clear()
        if self.alone:
            calls._busy_hands -= 1
        if self.alone or not calls._waiting:
            calls._change.notify_all()


class _Loop:
    """An event loop in a thread, for async calls; what holds it up is known by ``within``.

    ``looks`` counts those at which it had gone round since the one before: a call that is still there waits for
    something. A loop that has not is held up by the code that it is in, if that is the same as before.
    """

    def __init__(self, calls: CodeCalls) -> None:
        self._calls = calls
        self.notes = calls.notes
        self.within: tuple[CodeCall, float] | None = None
        self.calls: set[CodeCall] = set()
        self.looks = 0.0
        self.is_held_up = False  # by one piece of code, from the look before to the last one
        self._seen: tuple[CodeCall, float] | None = None  # what it was within at the last look
        self._asked = self._answered = 0
        self._events = calls.event_loops.take()
        self.loop = self._events.loop

    def begin(self, calls: Sequence[CodeCall]) -> None:
        """Begin calls, all at once."""
        with self._calls._change:
            for call in calls:
                self.calls.add(call)
                call.looks = self.looks + 1.0  # the next look has not seen it from its beginning
                self._calls._begun(call)
        self.loop.call_soon_threadsafe(self._start, calls)

    def look(self, counts: float) -> None:
        """Count a look; ``counts`` is what it counts where the loop has gone round."""
        within, self.is_held_up = self.within, False
        if self._answered == self._asked:
            self.looks += counts
            self._asked += 1
            self.loop.call_soon_threadsafe(self._answer, self._asked)
        elif within is not None and within is self._seen and self._events.thread is not None:
            self.looks += 1.0 if self._events.thread.waits() else _COMPUTES
            self.is_held_up = True
        self._seen = within

    def close(self) -> None:
        """End the calls that run, and give the loop back; one that is held up is left behind."""
        if self.loop.is_closed():  # by what it ran
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        for _ in range(_PATIENT):
            with suppress(TimeoutError):
                ending.result(_HELD_UP)
                self._calls.event_loops.give_back(self._events)
                return
            if self.within is not None:
                break
        self._events.close()

    def _answer(self, number: int) -> None:
        self._answered = number

    async def _end(self) -> None:
        with self._calls._change:
            tasks = [call.task for call in self.calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, calls: Sequence[CodeCall]) -> None:
        for call in calls:
            call.task = self.loop.create_task(self._one(call))

    async def _one(self, call: CodeCall) -> None:
        with self._calls._change:
            if call.forgotten or call not in self.calls:  # nobody waits for it, or another loop has it
                self.calls.discard(call)
                return
            call.has_begun = True
        number = self.notes.begin(call.row)
        limit = asyncio.timeout(self._calls.timeout)
        try:
            async with limit:
                PRINTING.set(call.row)  # of this task alone
                outcome = call.take(await Steps(self, call, call.row, call.fn(*call.args)))
        except asyncio.CancelledError as error:
            outcome = error
        except BaseException as error:
            expired = limit.expired() and isinstance(error, TimeoutError)
            outcome = Late(self._calls.timeout) if expired else error
        finally:
            self.notes.end(number)
        with self._calls._change:
            self.calls.discard(call)
            self._calls._end(call, outcome)
            if not self._calls._quick:
                self._calls._change.notify_all()
