"""Event loops for async user code: a client or a lock that it keeps belongs to the loop that it was used in."""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import suppress
from contextvars import copy_context

from .waiting_thread import WaitingThread


class EventLoop:
    """A loop that runs in a thread of its own until it is closed."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread: WaitingThread | None = None  # once it runs
        whole = copy_context()  # so that what is printed and warned is told to whom that of the op is
        threading.Thread(target=whole.run, args=(self._run,), daemon=True, name="flowrl-env-loop").start()

    def close(self) -> None:
        """End what runs, and the loop, as soon as the code that it is in lets it."""
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self._stop)

    def _run(self) -> None:
        self.thread = WaitingThread()
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _stop(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.create_task(self._end(tasks))

    async def _end(self, tasks: set[asyncio.Task[object]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.stop()


class EventLoops:
    """Those of one worker. Each is of one user at a time; the one that was given back last is taken next.

    They are closed when nobody has this any more.

    >>> loops = EventLoops()
    >>> first = loops.take()
    >>> loops.give_back(first)
    >>> loops.take() is first
    True
    """

    def __init__(self) -> None:
        self._idle: list[EventLoop] = []
        self._changing = threading.Lock()
        weakref.finalize(self, _close, self._idle)

    def __reduce__(self) -> tuple[type[EventLoops], tuple[()]]:
        """An environment that is sent to another process has others there."""
        return EventLoops, ()

    def take(self) -> EventLoop:
        """One that is idle, or a new one."""
        with self._changing:
            while self._idle:
                found = self._idle.pop()
                if not found.loop.is_closed():
                    return found
        return EventLoop()

    def give_back(self, loop: EventLoop) -> None:
        """Have one taken again, in which nothing of its user runs."""
        with self._changing:
            self._idle.append(loop)


def _close(loops: list[EventLoop]) -> None:
    for loop in loops:
        loop.close()
