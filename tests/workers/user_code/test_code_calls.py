"""A call of user code that waits holds up no other; those that are quick are answered together, however many."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from flowrl.workers.user_code.code_calls import LOOK, CodeCall, CodeCalls
from flowrl.workers.user_code.rows_in_progress import Notes, Row

SOON = 0.3  # seconds; a second was what others waited before


@pytest.fixture
def calls():
    made = CodeCalls(60.0, Notes())
    yield made
    made.close()


@pytest.fixture
def release():
    made = threading.Event()
    yield made
    made.set()


def call(number, fn, *args, is_async=False):
    return CodeCall(number, fn, args, Row(op="test", key=(number,)), is_async=is_async)


def others_end(calls, slow, quick, *, tries=5):
    """The fewest seconds that quick calls take which were begun with a slow one; the machine may be busy."""
    took = []
    for number in range(tries):
        began, found = time.monotonic(), []
        calls.begin([call(1000 * number, *slow), *(call(1000 * number + i, *quick) for i in range(1, 9))])
        while len(found) < 8:
            ended, _ = calls.collect(60.0)
            found += [each.session for each in ended]
        took.append(time.monotonic() - began)
        assert sorted(found) == [1000 * number + i for i in range(1, 9)], "the slow one is under way"
    return min(took)


def test_a_plain_call_that_waits_holds_up_no_other(calls, release):
    assert others_end(calls, (release.wait, 60), (lambda: 7,)) < SOON
    assert calls.under_way
    release.set()
    found = []
    while len(found) < 5:
        found += [each.outcome for each in calls.collect(60.0)[0]]
    assert found == [True] * 5


def test_a_call_that_waits_is_left_to_its_thread_at_the_second_look(calls, release):
    """Two ticks of the scheduler are what it holds up others for, whatever a clock says."""
    waits = call(0, release.wait, 60)
    calls.begin([waits])
    while calls._hand.call is not waits:
        time.sleep(LOOK)
    time.sleep(0.05)  # it waits by now
    with calls._change:
        first, left = time.monotonic(), []
        for tick in range(3):
            calls._look(first + 2 * tick * LOOK)
            left.append(waits in calls._slow)
    assert left == [False, True, True]


def test_an_async_call_that_waits_holds_up_no_other(calls):
    async def waits():
        await asyncio.sleep(60)

    async def quick():
        await asyncio.sleep(0)

    def begun(number, fn):
        return call(number, fn, is_async=True)

    took = []
    for number in range(5):
        began, found = time.monotonic(), []
        calls.begin([begun(100 * number, waits), *(begun(100 * number + i, quick) for i in range(1, 9))])
        while len(found) < 8:
            found += calls.collect(60.0)[0]
        calls.collect(0.0)
        took.append(time.monotonic() - began)
        assert all(each.session % 100 for each in found)
    assert min(took) < SOON


def test_a_coroutine_that_blocks_its_loop_holds_up_none_that_it_has_not_come_to(calls, release):
    """Thirty of them are begun with one that waits without await, which is the first: they go on in another loop."""

    async def blocks():
        release.wait(60)

    async def quick():
        return threading.current_thread().name

    began, found = time.monotonic(), []
    calls.begin([call(0, blocks, is_async=True), *(call(i, quick, is_async=True) for i in range(1, 31))])
    while len(found) < 30:
        found += calls.collect(60.0)[0]
        assert time.monotonic() - began < 30
    assert {each.session for each in found} == {*range(1, 31)}
    later = call(40, quick, is_async=True)
    calls.begin([later])
    while not (ended := calls.collect(60.0)[0]):
        pass
    assert ended == [later]
    release.set()
    while not (ended := calls.collect(60.0)[0]):
        pass
    assert [(each.session, each.outcome) for each in ended] == [(0, None)]


def test_calls_that_compute_are_waited_for(calls):
    """What comes next does not depend on how busy the machine is."""

    def computes():
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    calls.begin([call(i, computes) for i in range(10)])
    found = []
    while True:
        ended, quick = calls.collect(0.0)
        found += ended
        if not quick:
            break
    assert [each.session for each in found] == [*range(10)]
    assert not calls.under_way


def test_many_quick_coroutines_are_answered_together(calls):
    """Thousands take longer than others wait for one, and the loop is never still."""

    async def quick(number):
        await asyncio.sleep(0)
        return sum(range(number % 50))

    calls.begin([call(i, quick, i, is_async=True) for i in range(4096)])
    found = 0
    while True:
        ended, under_way = calls.collect(0.0)
        found += len(ended)
        if not under_way:
            break
    assert found == 4096 and not calls.under_way
