"""Seconds per GRPO step beside the peers: tuned TRL and a hand-written loop, same checkpoint, task, batch and steps.

    python benchmarks/grpo_step.py [--steps 60] [--rounds 3] [--threads 2] [--format table|json] [--without-trl]

The four run in turn, ``rounds`` times over, so that a machine whose speed drifts is fair to all. A figure is the median
of all steps but the first three of each run. No reference model. ``pip install -r benchmarks/requirements.txt``
brings TRL.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PEERS = HERE / "peers"
SKIP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--without-trl", action="store_true")
    said = parser.parse_args()
    if not said.without_trl and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install -r benchmarks/requirements.txt, or give --without-trl.")
    bench = Bench(said.out.resolve(), said.steps, said.threads)
    bench.checkpoint()
    walls: dict[str, list[float]] = {"flowrl_s": [], "trl_s": [], "limit_rows_s": [], "limit_shared_s": []}
    for number in range(said.rounds):
        print(f"round {number + 1} of {said.rounds}", file=sys.stderr)
        walls["flowrl_s"] += bench.flowrl()
        walls["limit_rows_s"] += bench.limit("rows")
        walls["limit_shared_s"] += bench.limit("shared")
        if not said.without_trl:
            walls["trl_s"] += bench.trl()
    medians = {name: round(statistics.median(w), 4) if w else None for name, w in walls.items()}
    if said.format == "json":
        print(json.dumps(medians))
        return
    mine = medians["flowrl_s"]
    for name, seconds in medians.items():
        ratio = "" if seconds is None else f"{seconds:8.4f} s   flowrl is {mine / seconds:.2f}x of it"
        print(f"{name:16}{ratio}")


class Bench:
    """Runs each peer as a process of its own, and reads its seconds per step."""

    def __init__(self, out: Path, steps: int, threads: int) -> None:
        self.out, self.steps, self.threads = out, steps, threads
        out.mkdir(parents=True, exist_ok=True)

    def checkpoint(self) -> None:
        """The supervised warm-up that all start from."""
        if not (self.out / "ckpt" / "model.safetensors").exists():
            self._process([sys.executable, "make_ckpt.py", "300", str(self.threads)], cwd=PEERS)

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
        return [json.loads(line)["seconds"] for line in lines][SKIP:]

    def limit(self, layout: str) -> list[float]:
        self._process([sys.executable, "limit_grpo.py", str(self.steps)], cwd=PEERS, LAYOUT=layout)
        return self._walls(f"limit_{layout}_s1_c0_l0_{self.threads}t.json")

    def trl(self) -> list[float]:
        self._process([sys.executable, "trl_grpo.py", "tuned", str(self.steps)], cwd=PEERS)
        return self._walls(f"trl_tuned_{self.threads}t_{self.steps}.json")

    def _walls(self, name: str) -> list[float]:
        return [row["wall"] for row in json.loads((self.out / name).read_text())["rows"]][SKIP:]

    def _process(self, words: list[str], cwd: Path | None = None, **env: str) -> None:
        threads = {n: str(self.threads) for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "THREADS")}
        env = {**os.environ, "PEERS_OUT": str(self.out), **threads, **env}
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
