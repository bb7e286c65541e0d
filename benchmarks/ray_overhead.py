"""What a call of an op costs on Ray, against a raw pipelined Ray call with the same arguments.

    python benchmarks/ray_overhead.py [--calls 200] [--rounds 5] [--format table|json]

The op takes a batch and adds one field; its rows lie on the rank. Calls of a program follow each other on one worker;
the schedule hands a few on before the last has answered. ``raw`` is the same record of a task sent to the same kind of
actor as often, all at once, its rows lying in Ray's object store, and the answers waited for together; ``raw one by
one`` waits for each before the next. Medians; then the same with more fields, and with more ranks in a group, where
``raw`` sends each call to as many actors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import ray
from rows import Numbers

import flowrl as fl
from flowrl.placement.plan.plan import Plan, Pool

ROWS = 128


FIELDS = tuple(f"f{i}" for i in range(16))


class Nothing(fl.Worker):
    @fl.op(reads="x", adds=", ".join(f"{n}: f32[]" for n in FIELDS), pieces=True)
    def own(self, batch):
        return {n: batch["x"].values + 1 for n in FIELDS}

    @fl.op(reads=None, adds="y: f32[]", pieces=True)
    def work(self, batch):
        return {"y": batch["f0"]}


flow = fl.Flow("overhead")
nothing = flow.worker(Nothing)
_spent: list[float] = []


@flow.program
def overhead(steps: int = 5, calls: int = 200, fields: int = 1):
    for _, batch in flow.steps(Numbers(ROWS), steps):
        batch = nothing.own(batch).select(*FIELDS[:fields])  # the rows are on the rank from here on
        float(batch.f0.mean())
        start = time.perf_counter()
        for _ in range(calls):
            last = nothing.work(batch)
        float(last.y.mean())
        _spent.append((time.perf_counter() - start) / calls)


def ours(calls: int, rounds: int, *, fields: int = 1, ranks: int = 1) -> list[float]:
    out = Path(tempfile.mkdtemp())
    _spent.clear()
    plan = Plan({"a": Pool("a", processes=ranks)})
    try:
        flow.run(out=out / "run", runtime="ray", plan=plan, quiet=True, checkpoint_every=10**9,
                 parameters={"overhead": {"steps": rounds, "calls": calls, "fields": fields}})  # fmt: skip
    finally:
        shutil.rmtree(out)
    return [1e3 * s for s in _spent[-rounds:]]  # the trace ran the program too


class Raw:
    """The least that such a call has to do: take the rows, and answer with their keys."""

    def run(self, task, rows):
        return task.title, len(rows["f0"])


def raw(calls: int, rounds: int, *, fields: int = 1, ranks: int = 1) -> tuple[list[float], list[float]]:
    from flowrl.batch import CallInfo
    from flowrl.runtime.distributed.protocol import RankCall
    from flowrl.runtime.values.remote_batch import Kind, RemoteBatch, Stored
    from flowrl.runtime.values.remote_batch import Source as Where
    from flowrl.runtime.values.rows_to_fetch import fetch

    actors = [ray.remote(Raw).remote() for _ in range(ranks)]
    names = FIELDS[:fields]
    batch = Numbers(ROWS).to_batch([{}] * ROWS, 0, None)
    stored = Stored(0, 1, batch.keys, {n: Kind("f32") for n in names}, {})
    remote = RemoteBatch(batch.keys, {n: Where((stored,), (n,)) for n in names})
    task = RankCall("nothing.work", "work", ("nothing", False), {"batch": fetch(remote)}, CallInfo(), keep=1)
    rows = ray.put({n: batch["x"] for n in names})
    ray.get([actor.run.remote(task, rows) for actor in actors])
    together, alone = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        ray.get([actor.run.remote(task, rows) for _ in range(calls) for actor in actors])
        together.append(1e3 * (time.perf_counter() - start) / calls)
        start = time.perf_counter()
        for _ in range(calls):
            ray.get([actor.run.remote(task, rows) for actor in actors])
        alone.append(1e3 * (time.perf_counter() - start) / calls)
    for actor in actors:
        ray.kill(actor)
    return together, alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    asked = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    found: dict[str, float] = {"cores": os.cpu_count() or 0}
    for fields in (1, 16):
        mine = ours(asked.calls, asked.rounds, fields=fields)
        together, alone = raw(asked.calls, asked.rounds, fields=fields)
        found[f"flowrl_ms, {fields} fields"] = statistics.median(mine)
        found[f"raw_ms, {fields} fields"] = statistics.median(together)
        found[f"raw_one_by_one_ms, {fields} fields"] = statistics.median(alone)
    for ranks in (2, 4):
        mine = ours(asked.calls, asked.rounds, ranks=ranks)
        together, _ = raw(asked.calls, asked.rounds, ranks=ranks)
        found[f"flowrl_ms, {ranks} ranks"] = statistics.median(mine)
        found[f"raw_ms, {ranks} ranks"] = statistics.median(together)
    for case in ("1 fields", "16 fields", "2 ranks", "4 ranks"):
        found[f"ratio to raw, {case}"] = found[f"flowrl_ms, {case}"] / found[f"raw_ms, {case}"]
    ray.shutdown()
    if asked.format == "json":
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:32} {value:8.3f}")


if __name__ == "__main__":
    main()
