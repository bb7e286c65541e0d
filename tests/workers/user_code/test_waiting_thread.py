"""A thread that waits is told from one that computes, also where the machine keeps it from computing."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from flowrl.workers.user_code.waiting_thread import WaitingProcess, WaitingThread


class Watched:
    """A thread that runs something until it is told to stop."""

    def __init__(self, run):
        self.stop, ready = threading.Event(), threading.Event()

        def work():
            self.thread = WaitingThread()
            ready.set()
            run(self.stop)

        self.worker = threading.Thread(target=work, daemon=True)
        self.worker.start()
        assert ready.wait(60)

    def looks(self, count):
        """What it says each other millisecond; of the first look too little is known."""
        found = []
        for _ in range(count + 1):
            time.sleep(0.005)
            found.append(self.thread.waits())
        return found[1:]

    def end(self):
        self.stop.set()
        self.worker.join(60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody can tell")
def test_who_waits_is_told_from_who_computes():
    def compute(stop):
        while not stop.is_set():
            sum(range(1000))

    waiting, computing = Watched(lambda stop: stop.wait(60)), Watched(compute)
    try:
        assert sum(waiting.looks(20)) >= 18
        assert sum(computing.looks(20)) <= 5
    finally:
        waiting.end()
        computing.end()


def test_a_thread_that_has_ended_waits():
    thread = Watched(lambda stop: None)
    thread.worker.join(60)
    assert thread.looks(1) == [True]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody can tell")
def test_a_process_waits_where_all_of_its_threads_do():
    def looks():
        watched, found = WaitingProcess(), []
        for _ in range(20):
            time.sleep(0.005)
            found.append(watched.waits())
        return sum(found)

    def compute(stop):
        while not stop.is_set():
            sum(range(1000))

    waiting = Watched(lambda stop: stop.wait(60))
    assert looks() >= 10
    computing = Watched(compute)
    try:
        assert looks() <= 3
    finally:
        waiting.end()
        computing.end()
