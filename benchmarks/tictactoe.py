"""A model learns tic-tac-toe from nothing: games lost before and after, the curve between, and the time that it takes.

``python benchmarks/tictactoe.py --seeds 3`` runs ``algorithms/tictactoe.py`` once for each seed, on one core, one after
another; with ``--add`` those of other seeds that are there already stay. Results go to ``docs/tictactoe.json``, which
the page on algorithms shows, the curve to ``docs/images/``. The exit status is 1 where a model loses more than 2 % of
its greedy games, or more than 1 % end with a wrong move.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "tictactoe.json"
PICTURE = ROOT / "docs" / "images" / "tictactoe.png"
LOST, WRONG = 0.02, 0.01
WINDOW = 20  # steps that a point of the curve is the mean of


def launch(seed: int, out: Path, flags: list[str]) -> dict[str, Any]:
    """Train with a seed; what greedy games came to before and after, and the share of sampled ones that were lost."""
    words = [sys.executable, str(ROOT / "algorithms" / "tictactoe.py"), "--out", str(out), "--overwrite", "--quiet"]
    words += ["--program", "warmup,evaluate,tictactoe,evaluate", "--seed", str(seed), *flags]
    began = time.perf_counter()
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    return {"seed": seed, "seconds": round(time.perf_counter() - began), **read(out)}


def read(out: Path) -> dict[str, Any]:
    """What the metrics of a run say."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    games = [line for line in lines if line["program"] in ("evaluate", "evaluate-2")]
    trained = [line for line in lines if line["program"] == "tictactoe"]
    half = len(games) // 2
    before, after = (
        {key: value for line in some for key, value in line.items() if key.startswith(("random_", "optimal_"))}
        for some in (games[:half], games[half:])
    )
    lost = [line["table/lost"] for line in trained]
    curve = [round(sum(part) / len(part), 4) for i in range(0, len(lost), WINDOW) if (part := lost[i : i + WINDOW])]
    played = sum(int(line["actor/rows"]) for line in trained)
    return {"steps": len(trained), "games": played, "before": before, "after": after, "curve": curve}


def reached(run: dict[str, Any]) -> bool:
    """Whether a trained model loses no more than it may."""
    after = run["after"]
    return all(after[f"{who}_lost"] <= LOST and after[f"{who}_wrong"] < WRONG for who in ("random", "optimal"))


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """The share of lost games over the games that were played, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    for run in runs:
        each = run["games"] / run["steps"] * WINDOW / 1000
        axis.plot([each * (i + 0.5) for i in range(len(run["curve"]))], run["curve"], label=f"seed {run['seed']}")
    axis.axhline(LOST, linewidth=0.7, color="#999999", linestyle=":")
    axis.set(xlabel="thousand games played", ylabel="share of games lost, sampled", ylim=(0, None))
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on tic-tac-toe, and write the page's numbers and curve.")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--add", action="store_true", help="keep the recorded runs of other seeds")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "tictactoe", help="folder of the runs")
    parser.add_argument("flags", nargs="*", help="further flags of the driver, behind --")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        run = launch(seed, options.out / str(seed), options.flags)
        print(f"seed {seed}: {run['after']}  {run['games']} games, {run['seconds']} s", flush=True)
        runs.append(run)
    if options.add:
        ran = {run["seed"] for run in runs}
        runs += [run for run in json.loads(RESULTS.read_text())["runs"] if run["seed"] not in ran]
        runs.sort(key=lambda run: run["seed"])
    RESULTS.write_text(json.dumps({"cores": 1, "runs": runs}) + "\n")
    draw(runs, PICTURE)
    return 0 if all(map(reached, runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
