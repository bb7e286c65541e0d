"""How long a planned move of weights takes, beside one raw gloo message of the same bytes per rank.

    python benchmarks/reshard_exec.py [--hidden 2048] [--layers 4] [--moves fsdp=4:tp=4 "fsdp=2 > tp=2"] [--gloo]

Real processes on this machine and a Llama of zeros. ``fsdp=4:tp=4`` stays on the same ranks, ``fsdp=2>tp=2`` goes to
others. Ranks read each other's shared memory; with ``--gloo`` they do as ranks of different hosts.

The peer: every rank sends its neighbour one tensor of as many bytes as the neighbour receives by the plan, all at once,
by gloo, and copies one tensor of as many bytes as the plan lets it take from itself. Both take turns between barriers,
the slowest rank counts, medians are printed: the ratio to message and copy, and, as ``wire``, that of the moves between
ranks alone to the message alone. Target: 1.5.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 1800.0  # seconds that one move may take, with all of its turns
MOVES = ("fsdp=2>tp=2", "tp=2>fsdp=2", "fsdp=2:tp=2", "fsdp=4:tp=4", "tp=4:fsdp=4", "fsdp=4:dp=2,tp=2")


def model_of(hidden: int, layers: int) -> Any:
    """The shape of a Llama with half as many heads of keys and values as of queries."""
    from flowrl.placement.model.model_shape import ModelShape

    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8 * hidden,
        "tie_word_embeddings": True,
    }
    return ModelShape.from_config(config, "bench")


def shards_of(model: Any, mesh: Any, rank: int, dtype: Any, device: str = "cpu") -> Iterator[Any]:
    """The shards of one rank."""
    import torch

    from flowrl.placement.model.weight_layout import Layout
    from flowrl.workers.weights.weight_boxes import Shard

    for weight, box in Layout(model, mesh).holds(rank):
        tensor = torch.zeros([b - a for a, b in box], dtype=dtype, device=device)
        yield Shard(weight.name, weight.shape, tuple(a for a, _ in box), tensor)


def work(me: int, meetings: list[str], move: str, options: argparse.Namespace, said: Any) -> None:
    """One rank: the plan, then both ways of sending in turns. The first rank says seconds and bytes."""
    import torch
    import torch.distributed as dist

    from flowrl.runtime.transfer.execute_moves import execute
    from flowrl.runtime.transfer.plan_moves import Moves, holdings, plan_moves
    from flowrl.runtime.transfer.wire import Wire

    torch.set_num_threads(1)
    old, new, first, size = parsed(move)
    dtype, model = getattr(torch, options.dtype), model_of(options.hidden, options.layers)
    held = {r: holdings(shards_of(model, old, r, dtype, "meta")) for r in range(old.size)}
    wanted = {first + r: holdings(shards_of(model, new, r, dtype, "meta")) for r in range(new.size)}
    begun = time.perf_counter()
    moves = plan_moves(held, wanted)
    planned = time.perf_counter() - begun
    between = Moves(tuple(m for m in moves.moves if not m.local), moves.dtypes)
    source = list(shards_of(model, old, me, dtype)) if me < old.size else []
    target = list(shards_of(model, new, me - first, dtype)) if me >= first else []
    dist.init_process_group("gloo", init_method=f"file://{meetings[0]}", rank=me, world_size=size)
    wire = Wire(me=me, size=size, meeting=meetings[1], shared=not options.gloo)
    after, before = (me + 1) % size, (me - 1) % size
    out, into = (torch.zeros(moves.received.get(r, 0), dtype=torch.uint8) for r in (after, me))
    kept, copied = torch.zeros(2, moves.local.get(me, 0), dtype=torch.uint8)

    def message() -> None:
        for request in (dist.isend(out, after), dist.irecv(into, before)):
            request.wait()  # type: ignore[union-attr]

    def done(what: Moves) -> Callable[[], object]:
        return lambda: execute(what, me=me, source=source, target=target, wire=wire, bucket_bytes=options.bucket)

    does = {"message": message, "copy": lambda: copied.copy_(kept), "move": done(moves), "wire": done(between)}
    times: dict[str, list[float]] = {name: [] for name in does}
    for turn in range(options.rounds + 1):
        for name, do in does.items():
            spent = timed(do)
            if turn:  # the first is warming up
                times[name].append(spent)
    if me == 0:
        sizes = {"received": max(moves.received.values()), "local": max(moves.local.values(), default=0)}
        said.put({**sizes, "moves": len(moves.moves), "planned": planned, **times})
    dist.barrier()
    wire.close()
    dist.destroy_process_group()


def timed(do: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    do()
    spent = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def parsed(move: str) -> tuple[Any, Any, int, int]:
    """Both meshes, the process of the destination's first rank, and how many processes there are."""
    from flowrl.placement.cluster.mesh import Mesh

    apart = ">" in move
    old, new = (Mesh.of(text) for text in move.split(">" if apart else ":"))
    return old, new, old.size if apart else 0, old.size + new.size if apart else max(old.size, new.size)


def measured(move: str, options: argparse.Namespace) -> dict[str, Any]:
    """One move, in fresh processes: bytes, and the median of each time in seconds."""
    context = multiprocessing.get_context("spawn")
    said, folder = context.Queue(), tempfile.mkdtemp()
    meetings = [f"{folder}/group", f"{folder}/wire"]
    ranks = [
        context.Process(target=work, args=(r, meetings, move, options, said), daemon=True)
        for r in range(parsed(move)[3])
    ]
    for rank in ranks:
        rank.start()
    found = said.get(timeout=LONGEST)  # a rank that failed says nothing
    for rank in ranks:
        rank.join()
    times = {name: statistics.median(value) for name, value in found.items() if isinstance(value, list)}
    ratios = {
        "ratio": times["move"] / (times["message"] + (times["copy"] if found["local"] else 0)),
        "wire_ratio": times["wire"] / times["message"],
    }
    return {**found, **times, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket", type=int, default=8 << 20, help="bytes of the largest message")
    parser.add_argument("--moves", nargs="+", default=MOVES, metavar="FROM:TO")
    parser.add_argument("--gloo", action="store_true", help="no shared memory")
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args()
    found = {move: measured(move.replace(" ", ""), options) for move in options.moves}
    if options.json:
        print(json.dumps(found))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch threads 1, medians of {options.rounds}, milliseconds")
    print(f"{'move':18} {'MB/rank':>8} {'own MB':>7} {'plan':>6} {'message':>8} {'copy':>6} {'move':>7} ratio  wire")
    for move, one in found.items():
        ms = {name: one[name] * 1e3 for name in ("planned", "message", "copy", "move")}
        print(
            f"{move:18} {one['received'] / 1e6:8.1f} {one['local'] / 1e6:7.1f} {ms['planned']:6.1f} "
            f"{ms['message']:8.1f} {ms['copy']:6.1f} {ms['move']:7.1f} {one['ratio']:5.2f} {one['wire_ratio']:5.2f}"
        )


if __name__ == "__main__":
    main()
