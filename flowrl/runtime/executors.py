"""Who runs the calls: at once in the caller (eager), or one thread per pool (local)."""

from __future__ import annotations

import queue
import threading
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

    def close(self, wait: bool = True) -> None:
        """End the threads. Without ``wait`` what is queued is dropped and what runs is left behind."""
        ...


class Eager:
    """Each call is run at once, in program order, in the caller's thread: where a debugger works."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def submit(self, call: Call, pools: Sequence[str]) -> None:
        del pools
        self._run(call)

    def close(self, wait: bool = True) -> None:
        pass


class Local:
    """One thread per pool; a pool takes its calls in program order, so pools overlap and nothing can deadlock:
    the earliest unfinished call is always at the head of its queues, with all its inputs done."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []

    def submit(self, call: Call, pools: Sequence[str]) -> None:
        if len(pools) == 1:
            self._queue(pools[0]).put(lambda: self._run(call))
            return
        lent = threading.Semaphore(0)  # released once by every other pool that has come to this call

        def run() -> None:
            for _ in pools[1:]:
                lent.acquire()
            self._run(call)

        def lend() -> None:
            lent.release()
            call.wait()

        self._queue(pools[0]).put(run)
        for pool in pools[1:]:
            self._queue(pool).put(lend)

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
        for work in self._queues.values():
            while not wait and not work.empty():
                with suppress(queue.Empty):
                    work.get_nowait()
            work.put(None)
        for thread in self._threads if wait else ():
            thread.join()


EXECUTORS: dict[str, Callable[[Run], Executor]] = {"eager": Eager, "local": Local}
