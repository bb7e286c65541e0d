"""Where jobs run: those of home pools in the driver's thread whenever it waits, those of others in a thread each."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Protocol

#: Seconds after which a waiting thread looks up: a signal that another thread was given is answered then, not before.
_SLICE = 1.0


class Job(Protocol):
    """Something to do in the thread of a pool. While one is waited for, the next one may be started."""

    def start(self) -> bool:
        """Start it. Returns whether :meth:`finish` has something to wait for."""
        ...

    def finish(self) -> bool:
        """Wait for it, or go on with it where others of its pool may begin meanwhile; return whether it is over."""
        ...


class Everywhere:
    """A container that has everything: with it as home, all pools are the driver's (the eager runtime)."""

    def __contains__(self, item: object) -> bool:
        return True


class Pools:
    """Jobs by pool, in the order in which they come. Pools overlap; two jobs of a pool never do, save that one is
    started before the one before it has finished.

    On a CPU torch is a third slower off the main thread, so the pool of the models is the driver's home
    (docs/design/0006-home-pool.md). ``changed`` is notified when a job for home arrives, and by whoever changes what
    the driver may wait for.
    """

    def __init__(self, home: Container[str], changed: threading.Condition) -> None:
        self._home, self._changed = home, changed
        self._at_home: deque[Job] = deque()
        self._queues: dict[str, queue.SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._broken: BaseException | None = None

    def break_off(self, error: BaseException) -> None:
        """Have whoever waits raise an error, from now on."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def is_home(self, pool: str) -> bool:
        """Whether the driver's thread serves a pool."""
        return pool in self._home

    def put(self, pool: str, job: Job) -> None:
        """Have a job run in the thread of a pool; after the end none is."""
        with self._changed:
            if self._closed:
                return
            if pool in self._home:
                self._at_home.append(job)
                self._changed.notify_all()
            else:
                self._queue(pool).put(job)

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once a condition holds, which is looked at under the lock; run the home jobs meanwhile."""
        while True:
            with self._changed:
                while True:
                    if self._broken is not None:
                        raise self._broken
                    if done():
                        return
                    if self._at_home:
                        break
                    self._changed.wait(_SLICE)
                job = self._at_home.popleft()
            if job.start():
                _finish(job)

    def _queue(self, pool: str) -> queue.SimpleQueue[Job | None]:
        found = self._queues.get(pool)
        if found is None:
            found = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(found,), name=f"flowrl-{pool}", daemon=True)
            thread.start()  # it may be one too many for the system: then no job is left in a queue that nobody serves
            self._queues[pool] = found
            self._threads.append(thread)
        return found

    def _serve(self, work: queue.SimpleQueue[Job | None]) -> None:
        """Do the jobs of a pool. What one of them fails with, which it should have told, is for whoever waits."""
        try:
            self._work_through(work)
        except BaseException as error:
            self.break_off(error)

    @staticmethod
    def _work_through(work: queue.SimpleQueue[Job | None]) -> None:
        started: deque[Job] = deque()
        closed = False
        while started or not closed:
            try:
                job = work.get(block=not started)
            except queue.Empty:  # in turns, also at the end: one may wait for what another has to take
                job = started.popleft()
                if not job.finish():
                    started.append(job)
                continue
            if job is None:
                closed = True
            elif job.start():
                started.append(job)

    def close(self, wait: bool = True) -> None:
        """End the threads. Without ``wait`` what is queued is dropped and what runs is left behind."""
        with self._changed:
            self._closed = True
            self._at_home.clear()
        for work in self._queues.values():
            while not wait and not work.empty():
                with suppress(queue.Empty):
                    work.get_nowait()
            work.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _finish(job: Job) -> None:
    while not job.finish():
        pass
