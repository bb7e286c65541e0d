"""Who runs the calls: at once in the caller (eager), or a queue per pool (local)."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from .call import Call

Run = Callable[[Call], None]


class Executor(Protocol):
    """Takes calls in program order and sees to it that each is run."""

    def submit(self, call: Call, pools: Sequence[str]) -> None:
        """Have a call run on the first pool while all of ``pools`` are its own."""
        ...

    def settle(self, call: Call) -> None:
        """Return once a call is done; the driver's thread asks."""
        ...

    def close(self, wait: bool = True) -> None:
        """End the threads. Without ``wait`` what is queued is dropped and what runs is left behind."""
        ...


class Eager:
    """Each call is run at once, in program order, in the caller's thread: where a debugger works."""

    def __init__(self, run: Run, home: str) -> None:
        del home
        self._run = run

    def submit(self, call: Call, pools: Sequence[str]) -> None:
        del pools
        self._run(call)

    def settle(self, call: Call) -> None:
        call.wait()

    def close(self, wait: bool = True) -> None:
        pass


class Local:
    """A queue per pool; a pool takes its calls in program order, so pools overlap and nothing can deadlock:
    the earliest unfinished call is always at the head of its queues, with all its inputs done.

    The pool ``home``, that of the models, is served by the driver's own thread whenever it waits, the others by a
    thread each: on a CPU, torch is a third slower off the main thread (docs/design/0006-home-pool.md).
    """

    def __init__(self, run: Run, home: str) -> None:
        self._run, self._home = run, home
        self._at_home: deque[Callable[[], None]] = deque()
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []

    def submit(self, call: Call, pools: Sequence[str]) -> None:
        if len(pools) == 1:
            self._put(pools[0], lambda: self._run(call))
            return
        lent = threading.Semaphore(0)  # released once by every other pool that has come to this call

        def run() -> None:
            for _ in pools[1:]:
                lent.acquire()
            self._run(call)

        def lend() -> None:
            lent.release()
            call.wait()

        self._put(pools[0], run)
        for pool in pools[1:]:
            self._put(pool, lend)

    def settle(self, call: Call) -> None:
        while not call.done and self._at_home:
            self._at_home.popleft()()
        call.wait()

    def _put(self, pool: str, job: Callable[[], None]) -> None:
        if pool == self._home:
            self._at_home.append(job)
        else:
            self._queue(pool).put(job)

    def _queue(self, pool: str) -> queue.SimpleQueue[Callable[[], None] | None]:
        found = self._queues.get(pool)
        if found is None:
            found = self._queues[pool] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(found,), name=f"flowrl-{pool}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return found

    @staticmethod
    def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := work.get()) is not None:
            job()

    def close(self, wait: bool = True) -> None:
        while wait and self._at_home:
            self._at_home.popleft()()
        for work in self._queues.values():
            while not wait and not work.empty():
                with suppress(queue.Empty):
                    work.get_nowait()
            work.put(None)
        for thread in self._threads if wait else ():
            thread.join()


EXECUTORS: dict[str, Callable[[Run, str], Executor]] = {"eager": Eager, "local": Local}
