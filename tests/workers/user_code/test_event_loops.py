"""Async user code finds the loop again in which it was before: clients and locks that it keeps belong to it."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time

import pytest

from flowrl.workers.user_code.code_calls import CodeCall, CodeCalls
from flowrl.workers.user_code.event_loops import EventLoops
from flowrl.workers.user_code.rows_in_progress import Notes, Row
from flowrl.workers.user_code.run_rows import run_rows


async def here():
    return asyncio.get_running_loop()


def loop_of_calls(loops, *others):
    """The loop that calls of one rollout run in."""
    calls = CodeCalls(60.0, Notes(), loops)
    row = Row(op="test", key=(0,))
    calls.begin([CodeCall(i, fn, (), row, is_async=True) for i, fn in enumerate((here, *others))])
    found = []
    while not found:
        found = [call.outcome for call in calls.collect(60.0)[0] if call.session == 0]
    calls.close()
    return found[0]


def test_one_that_was_given_back_is_taken_again_and_others_are_beside_it():
    loops = EventLoops()
    first, second = loops.take(), loops.take()
    assert first.loop is not second.loop
    loops.give_back(second)
    loops.give_back(first)
    assert loops.take() is first and loops.take() is second


def test_calls_and_rewards_of_a_worker_run_in_one_loop():
    loops = EventLoops()
    first = loop_of_calls(loops)
    assert loop_of_calls(loops) is first
    assert run_rows(here, [{}, {}], concurrency=2, timeout=60.0, loops=loops) == [first, first]
    assert loop_of_calls(EventLoops()) is not first


def test_a_call_that_waits_as_a_rollout_ends_is_ended_and_its_loop_is_used_again():
    loops, ended = EventLoops(), threading.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    first = loop_of_calls(loops, waits)
    assert ended.is_set() and loop_of_calls(loops) is first


def test_a_loop_that_is_held_up_is_left_behind():
    loops, release = EventLoops(), threading.Event()

    async def blocks():
        release.wait(60)

    first = loop_of_calls(loops, blocks)
    assert loop_of_calls(loops) is not first
    release.set()


def test_a_loop_that_was_ended_is_not_taken():
    loops = EventLoops()
    first = loops.take()
    loops.give_back(first)
    first.close()
    wait_until(first.loop.is_closed)
    assert loops.take() is not first


def test_in_another_process_there_are_others():
    loops = EventLoops()
    loops.give_back(loops.take())
    assert (other := copy.deepcopy(loops)) is not loops and other.take() is not loops.take()


def test_loops_end_with_their_worker():
    loops = EventLoops()
    first = loops.take()
    loops.give_back(first)
    del loops
    gc.collect()
    wait_until(first.loop.is_closed)


def wait_until(there):
    until = time.monotonic() + 60
    while not there() and time.monotonic() < until:
        time.sleep(0.01)
    assert there()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("outcome", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_exits_costs_no_more_than_its_loop(outcome):
    loops = EventLoops()

    async def leaves_a_task():
        async def exits():
            raise outcome

        asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, exits())
        await asyncio.sleep(0)

    first = loop_of_calls(loops, leaves_a_task)
    wait_until(first.is_closed)
    assert not loop_of_calls(loops).is_closed()
