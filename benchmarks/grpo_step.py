"""Seconds per GRPO step beside the peers: tuned TRL and a hand-written loop, same checkpoint, task, batch and steps.

    python benchmarks/grpo_step.py [--steps 60] [--rounds 3] [--threads 2] [--format table|json] [--without-trl]
        [--long 256] [--cpu]

The four run in turn, ``rounds`` times over, so that a machine whose speed drifts is fair to all. A figure is the median
of all steps but the first three of each run. No reference model. ``--long``: 4 prompts of about 100 tokens with 4
responses of so many at most, from random weights. ``--cpu``, for a machine that does other things too: CPU seconds of a
step in place of those on the wall, as what a process takes for all steps beyond one that makes five; to be read with
``--threads 1``. The median is over the rounds then. ``pip install -r benchmarks/requirements.txt`` brings TRL.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
PEERS = HERE / "peers"
SKIP, FEW = 3, 5
PARTS = ("generate", "update", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds in place of seconds on the wall")
    said = parser.parse_args()
    if not said.without_trl and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install -r benchmarks/requirements.txt, or give --without-trl.")
    bench = Bench(said.out.resolve(), said.steps, said.threads, said.long)
    bench.checkpoint()
    runs = {"flowrl_s": bench.flowrl, "trl_s": bench.trl}
    runs |= {f"limit_{layout}_s": partial(bench.limit, layout) for layout in ("rows", "shared")}
    walls: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(said.rounds):
        print(f"round {number + 1} of {said.rounds}", file=sys.stderr)
        for name, run in runs.items():
            if name != "trl_s" or not said.without_trl:
                walls[name] += bench.cpu(run) if said.cpu else run()
    medians = {name: round(statistics.median(w), 4) if w else None for name, w in walls.items()}
    if said.format == "json":
        print(json.dumps(medians))
        return
    mine = medians["flowrl_s"] or 0.0
    for name, seconds in medians.items():
        ratio = "" if seconds is None else f"{seconds:8.4f} s   flowrl is {mine / seconds:.2f}x of it"
        print(f"{name:16}{ratio}")
    for part in () if said.cpu else PARTS:
        own, other = (statistics.median(bench.parts[who, part]) for who in ("flowrl", "limit_shared"))
        print(f"{part:16}{own:8.4f} s   and {other:.4f} s of limit_shared")


class Bench:
    """Runs each peer as a process of its own, and reads its seconds per step."""

    def __init__(self, out: Path, steps: int, threads: int, long: int = 0) -> None:
        self.out, self.steps, self.threads, self.long = out, steps, threads, long
        self.parts: dict[tuple[str, str], list[float]] = {}  # seconds of each step
        self.spent = 0.0  # CPU seconds of the last process
        out.mkdir(parents=True, exist_ok=True)

    def checkpoint(self) -> None:
        """The supervised warm-up that all start from."""
        if not (self.out / "ckpt" / "model.safetensors").exists():
            self._process([sys.executable, "make_ckpt.py", "300", str(self.threads)], cwd=PEERS)

    def cpu(self, run: Callable[[], object]) -> list[float]:
        """CPU seconds of a step: a run of all steps less one of the first ones, which has the same start and end."""
        steps, spent = self.steps, {}
        for self.steps in (FEW, steps):
            run()
            spent[self.steps] = self.spent
        return [(spent[steps] - spent[FEW]) / (steps - FEW)]

    def flowrl(self) -> list[float]:
        run = self.out / "flowrl"
        words = [
            f"--steps={self.steps}",
            f"--out={run}",
            "--overwrite",
            "--no-save",
            "--quiet",
            "--checkpoint-every=1000000",
        ]
        self._process([sys.executable, str(HERE / "flowrl_grpo.py"), *words])
        lines = (run / "metrics.jsonl").read_text().splitlines()
        walls = [json.loads(line)["seconds"] for line in lines]
        calls: dict[str, list[float]] = {"generate": [0.0] * len(walls), "update": [0.0] * len(walls)}
        for call in map(json.loads, (run / "timeline.jsonl").read_text().splitlines()):
            kind = call["node"].rpartition(".")[2]
            if kind in calls:
                calls[kind][call["step"]] += call["end"] - call["start"]
        self._note("flowrl", walls, calls["generate"], calls["update"])
        return walls[SKIP:]

    def limit(self, layout: str) -> list[float]:
        self._process([sys.executable, "limit_grpo.py", str(self.steps)], cwd=PEERS, LAYOUT=layout)
        rows = self._rows(f"limit_{layout}_s1_c0_l0_{self.threads}t.json")
        walls = [row["wall"] for row in rows]
        updates = [row["logprob"] + row["fwdbwd"] + row["optim"] for row in rows]  # the first has what prepares it
        self._note(f"limit_{layout}", walls, [row["gen"] for row in rows], updates)
        return walls[SKIP:]

    def trl(self) -> list[float]:
        self._process([sys.executable, "trl_grpo.py", "tuned", str(self.steps)], cwd=PEERS)
        return [row["wall"] for row in self._rows(f"trl_tuned_{self.threads}t_{self.steps}.json")][SKIP:]

    def _rows(self, name: str) -> list[dict[str, float]]:
        return json.loads((self.out / name).read_text())["rows"]

    def _note(self, who: str, walls: list[float], generate: list[float], update: list[float]) -> None:
        rest = [wall - a - b for wall, a, b in zip(walls, generate, update, strict=True)]
        for part, seconds in zip(PARTS, (generate, update, rest), strict=True):
            self.parts.setdefault((who, part), []).extend(seconds[SKIP:])

    def _process(self, words: list[str], cwd: Path | None = None, **env: str) -> None:
        threads = {n: str(self.threads) for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "THREADS")}
        env = {**os.environ, "PEERS_OUT": str(self.out), "LONG": str(self.long), **threads, **env}
        before = _cpu_of_children()
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        self.spent = _cpu_of_children() - before
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _cpu_of_children() -> float:
    """CPU seconds of the processes that were waited for, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
