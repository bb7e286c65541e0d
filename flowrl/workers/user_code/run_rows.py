"""Calls of user code, row by row: concurrent, each with a time limit, and what becomes of one that exits or forks."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import copy_context
from typing import Any, Protocol

from .event_loops import EventLoops
from .failed_rewards import Late
from .printed_output import PRINTING
from .rows_in_progress import Notes, Row

#: Which row a call is at, by its place among the rows of the call.
At = Callable[[int], Row]
#: Told what a row gave, by its place, as soon as it is there.
Tell = Callable[[int, Any], None]
_SLACK = 0.2  # seconds that an event loop has to end a row by itself
_AT_ONCE = 0.001  # seconds between two looks at whether a row is done before others are begun beside it


def run_rows(
    fn: Callable[..., Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    concurrency: int,
    timeout: float | None,
    notes: Notes | None = None,
    loops: EventLoops | None = None,
    at: At = lambda place: Row(),
    tell: Tell = lambda place, outcome: None,
) -> list[Any]:
    """Call ``fn(**row)`` for every row, ``concurrency`` at a time; results, or the exceptions, in the order of rows.

    A plain function runs in threads; one that runs out of time is left behind with a TimeoutError as its result. An
    exit that it asks for is its exception. An async one runs in one of ``loops``. ``notes`` has the rows that it is at;
    ``tell`` is not told of rows that were left behind.
    """
    kept = notes or Notes()
    if not (inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)):
        return _run_threads(fn, rows, concurrency, timeout, kept, at, tell)
    outcomes: list[Any] = [None] * len(rows)
    left, found = list(range(len(rows))), loops or EventLoops()
    while left:
        left = _Loop(fn, rows, left, outcomes, concurrency, timeout, kept, at, tell).run(found)
    return outcomes


def called(job: Callable[[], Any], notes: Notes, row: Row) -> Any:
    """What a call gives, or its exception. Ctrl-C, which only the main thread is told of, ends the call."""
    number, process = notes.begin(row), os.getpid()
    printing = PRINTING.set(row)
    try:
        return job()
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        return error
    except BaseException as error:  # also an exit that user code asks for: nobody else is told of it here
        return error
    finally:
        PRINTING.reset(printing)
        if os.getpid() != process:
            notes.end_fork(row)
        notes.end(number)


def _told(tell: Tell, place: int, outcome: Any) -> Any:
    """What a row gave, or why that could not be told: nobody else hears of what a thread of rows raises."""
    try:
        tell(place, outcome)
    except Exception as error:
        return error
    return outcome


def _run_threads(
    fn: Any,
    rows: Sequence[Mapping[str, Any]],
    concurrency: int,
    timeout: float | None,
    notes: Notes,
    at: At,
    tell: Tell,
) -> list[Any]:
    results: list[Any] = [None] * len(rows)
    done = [False] * len(rows)
    waiting = deque(range(len(rows)))
    started: dict[int, float] = {}  # row -> when
    change = threading.Condition()

    def work() -> None:
        while True:
            with change:
                if not waiting:
                    return
                i = waiting.popleft()
                started[i] = time.monotonic()
            result = called(lambda: fn(**rows[i]), notes, at(i))  # noqa: B023
            with change:
                if done[i]:  # timed out meanwhile; another thread took this one's place
                    return
                results[i], done[i] = _told(tell, i, result), True
                started.pop(i, None)
                if not started and not waiting:
                    change.notify()

    def spawn() -> None:
        whole = copy_context()  # so that Python's warnings are told to whom those of the op are
        threading.Thread(target=whole.run, args=(work,), daemon=True, name="flowrl-reward").start()

    if rows:
        spawn()
    with change:
        # Threads of quick rows hold each other up: there are others once a row is still there at a second look. Its
        # age does not say that: this process may not have run meanwhile.
        looked_at = None
        while waiting:
            oldest = min(started, key=started.__getitem__, default=None)
            if oldest is not None and oldest == looked_at:
                break
            looked_at = oldest
            change.wait(_AT_ONCE)
        for _ in range(min(concurrency - 1, len(waiting))):
            spawn()
        while not all(done):
            now = time.monotonic()
            late = [i for i, t in started.items() if timeout is not None and now - t >= timeout]
            for i in late:
                results[i], done[i] = Late(timeout), True
                started.pop(i)
                spawn()
            if late:
                continue
            wait = None if timeout is None else min((t + timeout - now for t in started.values()), default=timeout)
            change.wait(wait)
    return results


class _Loop:
    """What runs in an event loop for the rows ``numbers``: the caller can leave it behind."""

    def __init__(
        self,
        fn: Any,
        rows: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        outcomes: list[Any],
        concurrency: int,
        timeout: float | None,
        notes: Notes,
        at: At,
        tell: Tell,
    ) -> None:
        self.fn, self.rows, self.numbers, self.outcomes = fn, rows, numbers, outcomes
        self.concurrency, self.timeout, self.notes, self.at, self.tell = concurrency, timeout, notes, at, tell
        self.begun: dict[int, bool] = {}  # rows, and whether they are done
        self.within: tuple[int, float] | None = None  # the row whose code runs now, and since when
        self.left = False
        self.ended = threading.Event()

    def run(self, loops: EventLoops) -> list[int]:
        """Run until all rows are done. Returns those that were not begun where one of them does not let others run."""
        events = loops.take()
        asyncio.run_coroutine_threadsafe(self._all(), events.loop)
        while not self.ended.wait(self.timeout):
            within = self.within
            if self.timeout is None or within is None or time.monotonic() - within[1] < self.timeout + _SLACK:
                continue
            self.left = True
            for i in (i for i, done in list(self.begun.items()) if not done):
                held_up = "; it waits without await, which stops all others" if i == within[0] else ""
                self.outcomes[i] = Late(self.timeout, held_up)
            events.close()
            return [i for i in self.numbers if i not in self.begun]
        loops.give_back(events)
        return []

    async def _all(self) -> None:
        gate = asyncio.Semaphore(self.concurrency)
        try:
            await asyncio.gather(*(self._one(gate, i) for i in self.numbers))
        finally:
            self.ended.set()

    async def _one(self, gate: asyncio.Semaphore, i: int) -> None:
        async with gate:
            if self.left:
                return
            self.begun[i] = False
            row = self.at(i)
            number = self.notes.begin(row)
            limit = asyncio.timeout(self.timeout)
            try:
                async with limit:
                    PRINTING.set(row)  # of this task alone
                    outcome = await Steps(self, i, row, self.fn(**self.rows[i]))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                outcome = Late(self.timeout) if limit.expired() and isinstance(error, TimeoutError) else error
            finally:
                self.notes.end(number)
            if not self.left:
                self.outcomes[i], self.begun[i] = _told(self.tell, i, outcome), True


class Within(Protocol):
    """What is told whose code runs in its loop, and since when."""

    within: Any
    notes: Notes


class Steps:
    """Awaits something, and has its loop know while its code runs, as opposed to waits; ``who`` is whose code it is."""

    def __init__(self, loop: Within, who: Any, row: Row, awaited: Any) -> None:
        self._loop, self._who, self._row, self._awaited = loop, who, row, awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        inner, process = self._awaited.__await__(), os.getpid()
        error: BaseException | None = None
        while True:
            self._loop.within = self._who, time.monotonic()
            try:
                waits = next(inner) if error is None else inner.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                self._loop.within = None
                if os.getpid() != process:
                    self._loop.notes.end_fork(self._row)
            error = None
            try:
                yield waits
            except BaseException as thrown:  # a cancellation: it is for the code inside
                error = thrown
