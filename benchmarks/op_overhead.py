"""What flowrl itself costs per op call, in microseconds: an op that does nothing, called many times in each runtime.

    python benchmarks/op_overhead.py [--calls 20000] [--format table|json]

The op takes a batch of 128 rows and adds one field. ``plain`` is the same op called on a plain worker: narrowing and
merging the batch, without a program. ``local_us`` is what a call of a running program costs from end to end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from rows import Numbers

import flowrl as fl

ROWS = 128


class Nothing(fl.Worker):
    @fl.op(reads="x", adds="y: f32[]")
    def work(self, batch):
        return {"y": batch["x"]}


flow = fl.Flow("overhead")
nothing = flow.worker(Nothing)
_spent: list[float] = []


@flow.program
def overhead(steps: int = 20, calls: int = 1000):
    for _, batch in flow.steps(Numbers(ROWS), steps):
        start = time.perf_counter()
        for _ in range(calls):
            last = nothing.work(batch)
        float(last.y.mean())
        _spent.append((time.perf_counter() - start) / calls)


def measure(runtime: str, steps: int, calls: int) -> float:
    out = Path(tempfile.mkdtemp())
    _spent.clear()
    try:
        flow.run(
            out=out / "run",
            runtime=runtime,
            quiet=True,
            checkpoint_every=10**9,
            parameters={"overhead": {"steps": steps, "calls": calls}},
        )
    finally:
        shutil.rmtree(out)
    return statistics.median(_spent[-steps:]) * 1e6


def plain(calls: int) -> float:
    worker, batch = Nothing(), Numbers(ROWS).to_batch([{}] * ROWS, 0, None)
    start = time.perf_counter()
    for _ in range(calls):
        worker.work(batch)
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    said = parser.parse_args()
    steps = max(2, said.calls // 1000)
    figures = {
        "plain_us": round(plain(said.calls), 1),
        "eager_us": round(measure("eager", steps, 1000), 1),
        "local_us": round(measure("local", steps, 1000), 1),
    }
    if said.format == "json":
        print(json.dumps(figures))
        return
    for name, us in figures.items():
        print(f"{name.removesuffix('_us'):8}{us:8.1f} us per call")


if __name__ == "__main__":
    main()
