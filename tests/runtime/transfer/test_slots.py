"""Messages that are read in the memory of their source: what two processes do, and what happens where one of them ends."""

import gc
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from ranks import copies

from flowrl.errors import RunError
from flowrl.placement.reshard.senders import Move
from flowrl.runtime.transfer.execute_moves import execute
from flowrl.runtime.transfer.plan_moves import Moves
from flowrl.runtime.transfer.rendezvous import new_meeting
from flowrl.runtime.transfer.slots import HostMemory, Slots
from flowrl.runtime.transfer.wire import Wire
from flowrl.workers.weights.weight_boxes import Shard

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name, of Linux")

ROWS, BUCKET = 64, 1 << 16
#: Twelve messages of one bucket from process 0 to process 1, so that every slot is used again.
MOVES = Moves(
    tuple(Move(f"w{n}", 0, 1, ((0, ROWS), (0, 256))) for n in range(12)), {f"w{n}": ("float32", 4) for n in range(12)}
)


# ---- in one process -----------------------------------------------------------------------------------------------


@pytest.fixture
def slots():
    """Those of two processes, here in one."""
    return [Slots(torch.device("cpu"), most=2) for _ in (0, 1)]


def test_a_slot_is_the_same_memory_at_both_ends(slots):
    slots[0].staging.fit(100)
    buffer = slots[0].staging.take()
    there = slots[1].open(0, slots[0].tell(buffer, 1))
    buffer.fill_(7)
    assert there.numel() == 100 and there.eq(7).all()
    assert slots[1].open(0, slots[0].tell(buffer, 1)) is there


def test_slots_that_made_place_for_larger_ones_are_let_go(slots):
    for size in (10, 20, 30):
        slots[0].staging.fit(size)
        taken = [slots[0].staging.take() for _ in range(2)]
        assert slots[0].staging.take() is None
        assert [slots[1].open(0, slots[0].tell(one, 1)).numel() for one in taken] == [size] * 2
        for one in taken:
            slots[0].staging.give(one)
    assert len(slots[1]._opened) == 2 and slots[0].staging.bytes == 60


def test_nothing_is_left_behind(slots):
    gc.collect()
    before = memory()
    slots[0].staging.fit(1 << 20)
    buffer = slots[0].staging.take()
    slots[1].open(0, slots[0].tell(buffer, 1))
    assert memory() > before
    for one in slots:
        one.drop()
    del buffer
    gc.collect()
    assert memory() == before


def memory():
    """How many mappings and files of this process are memory without a name."""
    files = [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")
    ]
    with open("/proc/self/maps") as maps:
        return sum("/memfd:" in line for line in [*files, *maps])


def test_another_file_with_the_same_number_is_not_opened():
    there = HostMemory()
    buffer = there.make(10)
    process, file, _, size = there.tell(buffer)
    with pytest.raises(OSError, match="another file than was told"):
        HostMemory().open([process, file, "0" * 16, size])


# ---- two processes ------------------------------------------------------------------------------------------------


def spoil(end, me):
    """What is wrong in one of the two processes."""
    if end == "killed while reading" and me == 1:
        Wire.give_back = after(2, Wire.give_back, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if end == "killed while lending" and me == 0:
        Wire.lend = after(2, Wire.lend, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if end == "late" and me == 1:
        Slots.open = after(1, Slots.open, lambda: time.sleep(5))
    if end == "gone" and me == 1:
        HostMemory.open = after(1, HostMemory.open, lambda: os.open("/proc/0/fd/0", os.O_RDWR))
    if end == "cannot lend" and me == 0:
        HostMemory.make = after(0, HostMemory.make, lambda: os.open("/proc/0/fd/0", os.O_RDWR))
    if end == "cannot read" and me == 1:
        HostMemory.open = after(0, HostMemory.open, lambda: os.open("/proc/0/fd/0", os.O_RDWR))


def after(times, does, then):
    """A function that does something else first once it was called so many times."""
    left = iter(range(times))

    def spoiled(*arguments):
        if next(left, None) is None:
            then()
        return does(*arguments)

    return spoiled


def process(me, end, meeting, said):
    """Numbers that tell weights and places apart, twice; or what an error says, and how long that took."""
    torch.set_num_threads(1)
    spoil(end, me)
    numbers = [torch.arange(ROWS * 256, dtype=torch.float32).view(ROWS, 256) + n for n in range(12)]
    with Wire(me=me, size=2, meeting=meeting, timeout=20) as wire:
        wire.timeout = 2 if end == "late" else 20
        shares, begun = wire.shares(0, 1), time.perf_counter()
        try:
            for turn in range(2):
                source = [shard(n, numbers[n] + turn) for n in range(12) if me == 0]
                target = [shard(n, torch.zeros(256, ROWS).t()) for n in range(12) if me == 1]
                moved = execute(MOVES, me=me, source=source, target=target, wire=wire, bucket_bytes=BUCKET)
                assert all(torch.equal(s.tensor, numbers[int(s.name[1:])] + turn) for s in target)
            said.send((shares, moved))
        except RunError as error:
            said.send((shares, error.what, time.perf_counter() - begun, wire.broken))


def shard(number, tensor):
    return Shard(f"w{number}", (ROWS, 256), (0, 0), tensor)


def two(end):
    """What both say, None for one that was killed."""
    meeting = new_meeting(Path(tempfile.mkdtemp()))
    context = copies()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    both = [context.Process(target=process, args=(me, end, meeting, pipes[me][1]), daemon=True) for me in (0, 1)]
    for one in both:
        one.start()
    for _, said in pipes:
        said.close()
    found = []
    for heard, _ in pipes:
        try:
            found.append(heard.recv())
        except EOFError:
            found.append(None)
    for one in both:
        one.join(20)
        assert one.exitcode in (0, -signal.SIGKILL)
    return found


def test_every_slot_is_used_again():
    (shares, sent), (_, received) = two("well")
    assert shares
    assert (sent.sent, sent.received, received.sent, received.received) == (12 * BUCKET, 0, 0, 12 * BUCKET)
    assert 0 < sent.peak_staging <= 4 * BUCKET and received.peak_staging == 0


@pytest.mark.parametrize("end", ["cannot lend", "cannot read"])
def test_where_memory_cannot_be_shared_messages_go_by_gloo(end):
    (shares, sent), (too, received) = two(end)
    assert not shares and not too
    assert sent.sent == received.received == 12 * BUCKET


def test_a_killed_reader_is_named():
    (_, said, seconds, broken), killed = two("killed while reading")
    assert killed is None and seconds < 10
    assert said.startswith("w2, and what goes with it, did not get from process 0 to process 1: process 1 is gone")
    assert said in broken


def test_a_killed_source_is_named():
    killed, (_, said, seconds, broken) = two("killed while lending")
    assert killed is None and seconds < 10
    assert "and what goes with it, did not get from process 0 to process 1" in said and said in broken


def test_a_reader_that_is_late_is_named():
    (_, said, seconds, _), (_, other, _, _) = two("late")
    assert said == "w1, and what goes with it, did not get from process 0 to process 1: not in 2 s." and seconds < 5
    assert "did not get from process 0 to process 1" in other


def test_memory_that_is_gone_is_named():
    (_, said, _, _), (_, other, _, _) = two("gone")
    assert said.startswith("w0, and what goes with it, did not get from process 0 to process 1: process 1 is gone")
    assert other.startswith("w0, and what goes with it, did not get from process 0 to process 1, which cannot read")
