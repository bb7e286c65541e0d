"""Every driver with every preset learns its small task: runs them, holds each against its mark, and draws the curves.

``make learn`` runs all, two at a time, each on one core; ``python benchmarks/learn.py --only grpo`` some. A policy
that starts from a warm-up starts from the same one, which is trained first. Results go to ``docs/learning.json``, which
the page on algorithms shows, curves to ``docs/images/``. The exit status is 1 where a run misses its mark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "learning.json"
WARM = "model/actor"
ONE_DIGIT = ("--one-digit", "1.0")


@dataclass(frozen=True)
class Run:
    """One driver with one preset: ``Run("grpo", "gspo", "reward", 0.7, ("--steps", "150"))``.

    ``number`` is what is logged in every step and should reach ``mark``: the mean of its last tenth, at least, or at
    most where ``mark`` is below where it began. ``warm`` names the workers that start from the warm-up.
    """

    driver: str
    preset: str | None
    number: str
    mark: float
    flags: tuple[str, ...] = ()
    program: str | None = None
    warm: tuple[str, ...] = ("actor",)
    falls: bool = field(default=False)
    name: str = ""  # in the place of the driver's and the preset's

    @property
    def title(self) -> str:
        return self.name or self.driver if self.preset in (None, self.driver) else f"{self.driver}-{self.preset}"


GRPO = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "cispo", "sapo"]
GRPO += ["gmpo", "gpg", "opo", "pass_at_k", "dppo", "topr", "kimi", "clip_cov", "kl_cov", "decoupled_ppo"]
GRPO += ["vespo", "m2po", "high_entropy", "deepseek_v3_2", "luspo", "maxrl", "lite_ppo", "otb", "icepop", "mis"]
#: Without discopop and apo_down, which do not make the better answer of this task likelier (docs/algorithms.md).
PAIRS = ["simpo", "cpo", "robust", "hinge", "exo", "sppo", "nca", "bco", "apo_zero"]
DISTILLED = ["one", "several", "sampled_jsd", "full", "forward", "jsd"]
#: Learning rates of the presets whose gradient has another size than that of the others.
RATES = {"dr_grpo": "3e-4", "topr": "1e-4", "rloo": "1e-4", "luspo": "1e-4"}

RUNS = [
    *(
        Run("grpo", p, "reward", 0.8, (*ONE_DIGIT, "--steps", "150", "--lr", RATES.get(p, "2e-4"))) for p in GRPO
    ),
    Run("sft", None, "loss", 1.2, ("--steps", "150"), warm=(), falls=True),
    Run("reward_model", None, "accuracy", 0.8, (*ONE_DIGIT, "--steps", "150"), program="reward_model", warm=("judge",)),
    Run("dpo", "dpo", "reward_accuracy", 0.9, (*ONE_DIGIT, "--steps", "120")),
    Run("dpo", "ipo", "reward_accuracy", 0.9, (*ONE_DIGIT, "--steps", "120")),
    Run("dpo", "cdpo", "reward_accuracy", 0.9, (*ONE_DIGIT, "--steps", "120")),
    Run("dpo", "orpo", "loss", 0.2, (*ONE_DIGIT, "--steps", "120"), falls=True),
    Run("dpo", "kto", "reward_accuracy", 0.9, (*ONE_DIGIT, "--steps", "120")),
    *(Run("dpo", p, "reward_accuracy", 0.9, (*ONE_DIGIT, "--steps", "120")) for p in PAIRS),
    *(Run("ppo", p, "reward", 0.7, (*ONE_DIGIT, "--steps", "120", "--prompts-per-step", "192"))
      for p in ("ppo", "vapo")),
    Run("remax", None, "reward", 0.7, (*ONE_DIGIT, "--steps", "150")),
    Run("dapo", None, "reward", 0.7, (*ONE_DIGIT, "--steps", "100")),
    Run("raft", None, "reward", 0.8, (*ONE_DIGIT, "--steps", "120")),
    Run("online_dpo", None, "reward", 0.7, (*ONE_DIGIT, "--steps", "120")),
    Run("judge", None, "exact_match", 0.6, ("--teach.one-digit", "1.0", "--judged.one-digit", "1.0",
        "--teach.steps", "150", "--judged.steps", "150"), program="teach,judged"),
    Run("judge", None, "reward", 0.7, ("--teach.one-digit", "1.0", "--two_agents.one-digit", "1.0",
        "--teach.steps", "150", "--two_agents.steps", "150"), program="teach,two_agents", name="two_agents"),
    *(Run("tool_use", p, "reward", 0.8, program="warmup,tool_use", warm=()) for p in ("tool_use", "gigpo", "turns")),
    Run("gigpo", None, "reward", 0.33, ("--steps", "300"), warm=()),
    Run("safe_rlhf", None, "reward", 0.4, (*ONE_DIGIT, "--steps", "150")),
    Run("rlhf", None, "exact_match", 0.3, ("--rlhf.one-digit", "1.0", "--preferences.one-digit", "1.0",
        "--rlhf.steps", "100", "--prompts-per-step", "128"), program="sft,preferences,rlhf", warm=()),
    *(Run("distillation", p, "reward", 0.4, ("--teach.steps", "150", "--distillation.steps", "120"),
          program="teach,distillation", warm=("actor", "short", "long")) for p in DISTILLED),
]  # fmt: skip


def launch(run: Run, seed: int, out: Path, warm: Path) -> dict[str, Any]:
    """Run it in a process of its own; gives its curve and how long it took."""
    words = [sys.executable, str(ROOT / "algorithms" / f"{run.driver}.py"), "--out", str(out), "--overwrite"]
    words += ["--quiet", "--no-save", "--seed", str(seed), *run.flags]
    words += ["--preset", run.preset] if run.preset else []
    words += ["--program", run.program] if run.program else []
    for worker in run.warm:
        words += ["--model", f"{worker}={warm}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    took = time.perf_counter() - began
    if done.returncode:
        return {"title": run.title, "seed": seed, "error": done.stderr[-2000:] or done.stdout[-2000:]}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    program = lines[-1]["program"]
    curve = [line[run.number] for line in lines if line["program"] == program and run.number in line]
    tenth = max(1, len(curve) // 10)
    first, last = sum(curve[:tenth]) / tenth, sum(curve[-tenth:]) / tenth
    return {
        "title": run.title,
        "driver": run.driver,
        "preset": run.preset,
        "seed": seed,
        "number": run.number,
        "first": round(first, 3),
        "last": round(last, 3),
        "seconds": round(took),
        "steps": len(curve),
        "command": " ".join(["python", f"algorithms/{run.driver}.py", *words[7:]]).replace(str(warm), "WARM"),
        "curve": [round(v, 4) for v in curve],
    }


def judged(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """Whether a result reaches the mark of its run."""
    reached = result["last"] <= run.mark if run.falls else result["last"] >= run.mark
    return {"mark": run.mark, "reached": reached}


def warm_up(folder: Path) -> Path:
    """The policy that others start from: 120 supervised steps, 15 seconds."""
    model = folder / "warm" / "model" / "actor"
    if not model.exists():
        words = [sys.executable, str(ROOT / "algorithms" / "grpo.py"), "--program", "warmup", "--steps", "120"]
        words += ["--out", str(folder / "warm"), "--overwrite", "--quiet"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return model


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A small picture per run, all seeds in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = list(dict.fromkeys(r["title"] for r in results if "curve" in r))
    columns = 6
    rows = -(-len(titles) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(2.2 * columns, 1.7 * rows), squeeze=False)
    for axis in axes.flat[len(titles) :]:
        axis.axis("off")
    for axis, title in zip(axes.flat, titles, strict=False):
        mine = [r for r in results if r["title"] == title and "curve" in r]
        for r in mine:
            curve, window = r["curve"], max(1, len(r["curve"]) // 30)
            smooth = [sum(curve[max(0, i - window) : i + 1]) / len(curve[max(0, i - window) : i + 1])
                      for i in range(len(curve))]  # fmt: skip
            axis.plot(smooth, linewidth=1, color="#0b6e8a")
        axis.axhline(mine[0]["mark"], linewidth=0.7, color="#999999", linestyle=":")
        axis.set_title(f"{title}: {mine[0]['number']}", fontsize=6.5)
        axis.tick_params(labelsize=5.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="runs whose title begins so; several times")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds of each run (1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learn", help="folder of the runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warm = warm_up(options.out)
    chosen = [r for r in RUNS if not options.only or any(r.title.startswith(o) for o in options.only)]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [(run, seed) for seed in seeds for run in chosen]
    results: list[dict[str, Any]] = []
    if RESULTS.exists():
        fresh = {(run.title, seed) for run, seed in jobs}
        known = {run.title for run in RUNS}
        results = [r for r in json.loads(RESULTS.read_text())["runs"]
                   if (r["title"], r["seed"]) not in fresh and r["title"] in known]  # fmt: skip
    run_of = {run.title: run for run in RUNS}
    for kept in results:
        kept |= judged(run_of[kept["title"]], kept)
    missed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(launch, run, seed, options.out / f"{run.title}-{seed}", warm) for run, seed in jobs]
        for one in waiting:
            found = one.result()
            if "error" in found:
                missed += 1
                print(f"{found['title']:36} seed {found['seed']}: FAILED\n{found['error']}", flush=True)
                continue
            found |= judged(run_of[found["title"]], found)
            missed += not found["reached"]
            told = f"{found['number']} {found['first']:.2f} -> {found['last']:.2f} (mark {found['mark']})"
            word = "" if found["reached"] else "  MISSED"
            print(f"{found['title']:36} seed {found['seed']}: {told}  {found['seconds']} s{word}", flush=True)
            results.append(found)
    order = {run.title: number for number, run in enumerate(RUNS)}
    results.sort(key=lambda r: (order[r["title"]], r["seed"]))
    RESULTS.write_text(json.dumps({"cores": 1, "runs": results}) + "\n")
    draw(results, ROOT / "docs" / "images" / "learning.png")
    print(f"{RESULTS.relative_to(ROOT)}   docs/images/learning.png   {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
