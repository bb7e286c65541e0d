"""A wire that ends while somebody waits on it, and what is left of one that has ended."""

import gc
import os
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from flowrl.errors import RunError
from flowrl.placement.reshard.senders import Move
from flowrl.runtime.transfer.execute_moves import execute
from flowrl.runtime.transfer.plan_moves import Moves
from flowrl.runtime.transfer.rendezvous import new_meeting
from flowrl.runtime.transfer.wire import Wire
from flowrl.workers.weights.weight_boxes import Shard


def wires(size, **how):
    """Wires of several processes, all of them in this one."""
    meeting = new_meeting(Path(tempfile.mkdtemp()))
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda me: Wire(me=me, size=size, meeting=meeting, timeout=60, **how), range(size)))


def begun(wait):
    """Begin to wait in a thread of its own. What is given says what it raised, and fails where it waits on."""
    said = []

    def work():
        try:
            wait()
            said.append("through")
        except (RuntimeError, RunError) as error:
            said.append(error.what if isinstance(error, RunError) else str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive(), "it was to wait"

    def ended():
        thread.join(10)
        assert said, "it waits on"
        return said[0]

    return ended


WAITS = {
    "receive": lambda wire: wire.receive(torch.zeros(4), 1),
    "borrow": lambda wire: wire.borrow(1),
    "lend": lambda wire: wire.lend(slot(wire), 1),
    "send": lambda wire: wire.send(torch.zeros(1 << 24), 1),  # more than the system keeps for who does not read
}


def slot(wire):
    wire.slots.staging.fit(64)
    return wire.slots.staging.take()


@pytest.mark.parametrize("what", WAITS)
def test_closing_from_another_thread_ends_a_wait_at_both_ends(what):
    one, two = wires(2)
    mine, theirs = WAITS[what](one), two.receive(torch.zeros(4), 0) if what in ("receive", "borrow") else None
    waits = begun(lambda: mine.wait(60))
    other = begun(lambda: theirs.wait(60)) if theirs is not None else None
    start = time.monotonic()
    one.close("rank 1 is lost")
    assert waits() != "through"
    assert other is None or "closed by peer" in other()
    assert time.monotonic() - start < 5
    with pytest.raises(RunError, match="of no more use: rank 1 is lost"):
        one.receive(torch.zeros(1), 1)
    two.close()


def test_a_message_that_begins_as_another_thread_closes_its_wire_keeps_it_from_nothing():
    """What was under way was gone through as it came: the wire was not closed, and both ends waited on."""
    one, two = wires(2)
    gloo, under_way, go = one._gloo, threading.Event(), threading.Event()

    class Slow:
        def recv(self, *args):
            under_way.set()
            assert go.wait(10)
            return gloo.recv(*args)

    class UnderWay(WeakSet):
        def __iter__(self):
            for sending in super().__iter__():
                go.set()
                late.join(0.2)
                yield sending

    waits = begun(lambda: one.receive(torch.zeros(4), 1).wait(60))
    other = begun(lambda: two.receive(torch.zeros(4), 0).wait(60))
    one._gloo, one._under_way = Slow(), UnderWay(one._under_way)
    late = threading.Thread(target=lambda: one.receive(torch.zeros(4), 1))
    late.start()
    assert under_way.wait(10)
    one.close("rank 1 is lost")
    late.join(10)
    assert waits() != "through" and "closed by peer" in other()
    two.close()


#: Process 0 waits for process 1, which waits for process 2 before it sends anything.
CHAIN = Moves((Move("w", 2, 1, ((0, 4),)), Move("w", 1, 0, ((0, 4),))), {"w": ("float32", 4)})


def go(me, wire):
    whole, into = (Shard("w", (4,), (0,), torch.full((4,), float(me))) for _ in range(2))
    execute(CHAIN, me=me, source=[whole], target=[into], wire=wire)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
def test_a_move_ends_for_all_once_it_ends_for_one(shared):
    three = wires(3, shared=shared)
    waits = [begun(lambda me=me: go(me, three[me])) for me in (0, 1)]
    start = time.monotonic()
    three[2].close()
    lost = "w, and what goes with it, did not get from process {} to process {}: process {} is gone, or has given up."
    assert [one() for one in waits] == [lost.format(1, 0, 1), lost.format(2, 1, 2)]
    assert time.monotonic() - start < 5


def test_who_is_told_says_what_it_was_told():
    three = wires(3)
    waits = begun(lambda: go(1, three[1]))
    three[1].close("rank 7 is lost")
    assert re.fullmatch(r"w, and what goes with it, did not get from process . to process .: rank 7 is lost\.", waits())
    for wire in three:
        wire.close()


def test_one_that_is_not_wanted_any_more_waits_for_nobody():
    """The others have met it, and one of them ends before it connects."""
    meeting, wanted = new_meeting(Path(tempfile.mkdtemp())), [True]
    missing = threading.Event()

    class Ends(Wire):
        def _open_groups(self, seconds):
            missing.set()
            raise RunError("process 1 ends here.")

    threads = ThreadPoolExecutor(2)
    ends = threads.submit(lambda: Ends(me=1, size=2, meeting=meeting, timeout=60))
    waits = threads.submit(lambda: Wire(me=0, size=2, meeting=meeting, timeout=60, wanted=lambda: wanted[0]))
    assert missing.wait(10) and ends.exception(10) is not None
    time.sleep(0.3)
    assert not waits.done()
    wanted[0], start = False, time.monotonic()
    with pytest.raises(RunError, match="process 0 was told that the others will not come"):
        waits.result(10)
    assert time.monotonic() - start < 5
    threads.shutdown()


def held():
    """Open files, threads and mappings of memory without a name of this process, once its threads have ended."""
    time.sleep(0.3)
    with open("/proc/self/maps") as maps:
        shared = sum("/memfd:" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared


def opened_and_closed(how):
    """Three wires with one move, which fails where one process ends first."""
    three = wires(3)
    if how == "failed":
        waits = [begun(lambda me=me: go(me, three[me])) for me in (0, 1)]
        three[2].close()
        assert all("is gone, or has given up" in one() for one in waits)
    else:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(go, range(3), three))
    for wire in three * (2 if how == "closed twice" else 1):
        wire.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, of Linux")
@pytest.mark.parametrize("how", ["closed", "failed", "closed twice"])
def test_nothing_is_left_of_a_wire(how):
    """Not even where a move over it has failed, and without waiting for the collector of cycles."""
    counts = []
    gc.collect()
    gc.disable()
    try:
        for turn in range(7):
            opened_and_closed(how)
            if turn in (2, 6):
                counts.append(held())
    finally:
        gc.enable()
    assert counts[0] == counts[1]
