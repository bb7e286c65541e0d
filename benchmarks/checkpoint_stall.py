"""How long a checkpoint stops the training, beside one that is written while the training waits.

    python benchmarks/checkpoint_stall.py [--millions 150] [--checkpoints 2] [--every 3] [--runtimes local,ray]
                                          [--out DIR] [--format table|json]

A transformer with random weights is trained in fp32 with AdamW, in one process (``hf``) and on two ranks (``fsdp2``).
Its checkpoints are taken in turn as runs take them, from a copy of the state and in the background, and as they are
taken where a host has no memory for that copy: written while the training waits. Both write the same files. The stall
is the time from the end of a step until the next one may begin; the first one of the background is given apart, as the
memory for its copy is new. Medians; ``step`` and ``step beside`` are steps while nothing and while a checkpoint is
written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Place, Plan, Pool
from flowrl.runtime.driver.runner import Runner
from flowrl.runtime.driver.take_checkpoint import Checkpoints
from flowrl.runtime.storage.checkpoints.background_writer import CheckpointWriter
from tasks import arithmetic

WIDTH = 1024
RANKS = Plan(
    {"train": Pool("train", devices=(0, 1))},
    {"actor": Place("train", Mesh.of("fsdp=2"), "fsdp2")},
    cluster=Cluster.of("cpu:1x2"),
)


def model(millions: int) -> fl.Model:
    """A model of about so many million weights."""
    layers = max(1, round(millions * 1e6 / (16 * WIDTH * WIDTH)))
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": WIDTH // 8}
    return fl.Model(config={**arithmetic.MODEL.config, **sizes, **heads}, tokenizer=arithmetic.build_tokenizer)


def take_turns() -> None:
    """Have every other copy of a worker's state in this process be none, as if the host had no memory for it."""
    from flowrl.runtime.storage.checkpoints.snapshot import Copies

    if hasattr(Copies, "turns"):
        return
    real = Copies.turns = Copies.take  # type: ignore[attr-defined]

    def take(self, shards):
        self.turn = getattr(self, "turn", 0) + 1
        return real(self, shards) if self.turn % 2 else (list(shards), 1)

    Copies.take = take


class Actor(fl.Actor):
    def open(self, opening):
        take_turns()
        super().open(opening)


class Watch:
    """Times the checkpoints and the steps of a run in this process."""

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.writes: list[tuple[float, float]] = []  # in the background: from when to when
        self.steps: list[tuple[float, float]] = []
        self._last = 0.0

    def __enter__(self) -> Watch:
        self.real = Checkpoints.take, Runner._commit, CheckpointWriter._write
        watch = self

        def take(checkpoints, point):
            if point.record is None:  # the end of the program
                return watch.real[0](checkpoints, point)
            start = time.perf_counter()
            watch.real[0](checkpoints, point)
            watch._last = time.perf_counter()
            watch.stalls.append(watch._last - start)

        def commit(runner, stage, step):
            now = time.perf_counter()
            if watch._last:
                watch.steps.append((watch._last, now))
            watch._last = now
            return watch.real[1](runner, stage, step)

        def write(writer, begun, written):
            start = time.perf_counter()
            watch.real[2](writer, begun, written)
            watch.writes.append((start, time.perf_counter()))

        Checkpoints.take, Runner._commit, CheckpointWriter._write = take, commit, write  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Checkpoints.take, Runner._commit, CheckpointWriter._write = self.real

    def result(self) -> dict[str, Any]:
        background, blocking = self.stalls[2::2], self.stalls[1::2]
        busy = [write for write, _ in zip(self.writes[::2], self.stalls[::2], strict=False)]
        took = [end - start for start, end in self.steps]
        beside = [any(a < end and start < b for a, b in busy) for start, end in self.steps]
        found = {
            "blocking s": statistics.median(blocking),
            "stall s": statistics.median(background),
            "first stall s": self.stalls[0],
            "background write s": statistics.median(b - a for a, b in busy),
            "step s": _median([t for t, b in zip(took, beside, strict=True) if not b]),
            "step beside s": _median([t for t, b in zip(took, beside, strict=True) if b]),
        }
        return {**found, "ratio": found["stall s"] / found["blocking s"]}


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def measure(runtime: str, *, millions: int, checkpoints: int, every: int, out: Path) -> dict[str, Any]:
    """Run ``2 * checkpoints + 1`` checkpoints, in turn in the background and waited for."""
    flow = fl.Flow("stall")
    actor = flow.worker(Actor, model(millions), lr=1e-5, max_tokens=8)

    @flow.program
    def train(steps: int = 8):
        for step, batch in flow.steps(arithmetic.examples(8), steps):
            flow.log(step, actor.update(batch, loss=rl.sft()))

    how: dict[str, Any] = {"plan": RANKS} if runtime == "ray" else {}
    steps = every * (2 * checkpoints + 1) + every - 1
    with Watch() as watch:
        flow.run(out=out / runtime, runtime=runtime, quiet=True, checkpoint_every=every, save_models=False,
                 parameters={"train": {"steps": steps}}, **how)  # fmt: skip
    newest = max((out / runtime / "checkpoints").iterdir())
    size = sum(p.stat().st_size for p in newest.iterdir())
    return {"runtime": runtime, "GB": size / 1e9, **watch.result()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=150)
    parser.add_argument("--checkpoints", type=int, default=2)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--runtimes", default="local,ray")
    parser.add_argument("--out", type=Path, default=None, help="a folder on the disk to write to")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = Path(tempfile.mkdtemp(dir=args.out))
    found = []
    try:
        for runtime in args.runtimes.split(","):
            how = {"millions": args.millions, "checkpoints": args.checkpoints, "every": args.every}
            found.append(measure(runtime, **how, out=out))
            if args.format == "table":
                show(found[-1])
            shutil.rmtree(out / runtime)
    finally:
        shutil.rmtree(out)
    if args.format == "json":
        print(json.dumps(found, indent=1))


def show(found: dict[str, Any]) -> None:
    said = (f"{name} {value:.3f}" if isinstance(value, float) else f"{value:6}" for name, value in found.items())
    print("  ".join(said), flush=True)


if __name__ == "__main__":
    main()
