"""Weights that move between CUDA tensors: through NCCL with a device each, through host memory where they share one."""

import multiprocessing
import socket

import pytest
import torch

from flowrl.runtime.moves.execute import execute
from flowrl.runtime.moves.plan import Held, plan_moves
from flowrl.runtime.moves.wire import Wire
from flowrl.workers.weights import Shard

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 4096, 512


def process(me, port, devices, said):
    """Rows before, columns afterwards, float32 before, bfloat16 afterwards."""
    device = f"cuda:{me % devices}"
    torch.cuda.set_device(device)
    full = torch.arange(ROWS * COLUMNS, dtype=torch.float32, device=device).view(ROWS, COLUMNS)
    half = ROWS // 2, COLUMNS // 2
    rows = [((r * half[0], (r + 1) * half[0]), (0, COLUMNS)) for r in (0, 1)]
    columns = [((0, ROWS), (r * half[1], (r + 1) * half[1])) for r in (0, 1)]
    moves = plan_moves(
        {r: {"w": Held("float32", 4, (ROWS, COLUMNS), (box,))} for r, box in enumerate(rows)},
        {r: {"w": Held("bfloat16", 2, (ROWS, COLUMNS), (box,))} for r, box in enumerate(columns)},
    )
    source = [Shard("w", (ROWS, COLUMNS), (me * half[0], 0), full[rows[me][0][0] : rows[me][0][1]].clone())]
    into = torch.zeros(ROWS, half[1], dtype=torch.bfloat16, device=device)
    target = [Shard("w", (ROWS, COLUMNS), (0, me * half[1]), into)]
    with Wire(me=me, size=2, port=port, timeout=60, device=device) as wire:
        for _ in range(2):
            moved = execute(moves, me=me, source=source, target=target, wire=wire, bucket_bytes=1 << 20)
        torch.cuda.synchronize()
        equal = torch.equal(into, full[:, me * half[1] : (me + 1) * half[1]].bfloat16())
        said.send((equal, moved.received, moves.received[me], wire.staging.device.type))


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_become_columns(devices):
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=process, args=(r, port, devices, pipes[r][1])) for r in range(2)]
    for one in processes:
        one.start()
    told = [heard.recv() for heard, _ in pipes]
    for one in processes:
        one.join(60)
    for equal, received, planned, where in told:
        assert equal and received == planned
        assert where == ("cuda" if devices == 2 else "cpu")
