"""Weights that move between CUDA tensors: by CUDA IPC on one device, by NCCL with a device each, else through the host."""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from flowrl.errors import RunError
from flowrl.runtime.transfer.execute_moves import execute
from flowrl.runtime.transfer.plan_moves import Held, plan_moves
from flowrl.runtime.transfer.rendezvous import new_meeting
from flowrl.runtime.transfer.wire import Wire
from flowrl.workers.weights.weight_boxes import Shard

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 4096, 512


def cut(size):
    """The moves from rows to columns, float32 to bfloat16, and the boxes of every process before and afterwards."""
    step = ROWS // size, COLUMNS // size
    rows = [((r * step[0], (r + 1) * step[0]), (0, COLUMNS)) for r in range(size)]
    columns = [((0, ROWS), (r * step[1], (r + 1) * step[1])) for r in range(size)]
    moves = plan_moves(
        {r: {"w": Held("float32", 4, (ROWS, COLUMNS), (box,))} for r, box in enumerate(rows)},
        {r: {"w": Held("bfloat16", 2, (ROWS, COLUMNS), (box,))} for r, box in enumerate(columns)},
    )
    return moves, rows, columns


def inside(tensor, box):
    return tensor[tuple(slice(a, b) for a, b in box)]


def process(me, size, meeting, devices, shared, killed, said):
    """Rows before, columns afterwards, three times with other numbers; then one process is killed before it reads."""
    device = f"cuda:{me % devices}"
    torch.cuda.set_device(device)
    moves, rows, columns = cut(size)
    full = torch.arange(ROWS * COLUMNS, dtype=torch.float32, device=device).view(ROWS, COLUMNS)
    into = torch.zeros(ROWS, COLUMNS // size, dtype=torch.bfloat16, device=device)
    target = [Shard("w", (ROWS, COLUMNS), (0, columns[me][1][0]), into)]
    equal = True
    with Wire(me=me, size=size, meeting=meeting, timeout=60, device=device, shared=shared) as wire:
        for turn in range(3):
            source = [Shard("w", (ROWS, COLUMNS), (rows[me][0][0], 0), inside(full, rows[me]) * (turn + 1))]
            bucket = (1 << 18) << turn  # larger slots take the place of smaller ones
            moved = execute(moves, me=me, source=source, target=target, wire=wire, bucket_bytes=bucket)
            source[0].tensor.zero_()  # it may be written again
            torch.cuda.synchronize()
            equal = equal and torch.equal(into, (inside(full, columns[me]) * (turn + 1)).bfloat16())
        reads = [a for a in range(size) if wire.shares(a, me)]
        said.send((equal, moved.received == moves.received[me], reads, wire.staging.device.type))
        if me == killed:
            wire.give_back = lambda to: os.kill(os.getpid(), signal.SIGKILL)
        try:
            if killed is not None:
                execute(moves, me=me, source=source, target=target, wire=wire)
            said.send("")
        except RunError as error:
            said.send(error.what)


def told(size, devices, shared=True, killed=None):
    """What the processes say, those that are killed the first part of it."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    meeting = new_meeting(Path(tempfile.mkdtemp()))
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    started = [
        context.Process(target=process, args=(r, size, meeting, devices, shared, killed, pipes[r][1]), daemon=True)
        for r in range(size)
    ]
    for one in started:
        one.start()
    found = [heard.recv() for heard, _ in pipes]
    ends = [heard.recv() for r, (heard, _) in enumerate(pipes) if r != killed]
    for one in started:
        one.join(60)
    return found, ends


#: Name: (processes, devices, whether memory is shared, whom process 0 reads from, where messages are staged for others).
WAYS = {
    "one device": (2, 1, True, [1], "cpu"),
    "one device through the host": (2, 1, False, [], "cpu"),
    "a device each": (2, 2, True, [], "cuda"),
    "two on each of two": (4, 2, True, [2], "cpu"),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_become_columns(way):
    size, devices, shared, reads, where = WAYS[way]
    found, _ = told(size, devices, shared)
    assert all(equal and as_planned for equal, as_planned, _, _ in found)
    assert found[0][2:] == (reads, where)


def test_a_killed_reader_is_named():
    _, ends = told(2, 1, killed=1)
    assert ends[0].startswith("w, and what goes with it, did not get from process ") and "process 1 is gone" in ends[0]
