"""What correcting for stale rows is worth: a program four steps ahead, with losses that correct and one that does not.

``python benchmarks/stale.py`` trains one-digit sums under a plan with staleness 4, so that in the steady state every
row is four versions old, with five seeds per loss, each run on one core, two at a time. It writes ``docs/stale.json``
and ``docs/images/stale.png``. The uncorrected loss takes its ratio to the policy just before the update, recomputed, as
if that had sampled; flowrl refuses it for stale rows unless the update says ``allow_stale=True``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAN = """\
pools:
  train:   {device: cpu}
  rollout: {device: cpu}
place:
  actor:
    train:    {pool: train}
    generate: {pool: rollout}
  reward: {pool: rollout}
pipeline: {staleness: 4}
"""
LOSSES = {
    "uncorrected": 'rl.ppo_clip(anchor="old")',
    "ppo_clip": "rl.ppo_clip()",
    "decoupled_ppo": "rl.decoupled_ppo()",
}


def train(name: str, seed: int, steps: int, lr: float, warm: str, out: str) -> None:
    """One run, in this process."""
    sys.path.insert(0, str(ROOT / "algorithms"))
    import flowrl as fl
    from flowrl import rl
    from tasks import arithmetic

    loss = {
        "uncorrected": rl.ppo_clip(anchor="old"),
        "ppo_clip": rl.ppo_clip(),
        "decoupled_ppo": rl.decoupled_ppo(),
    }[name]
    flow = fl.Flow("stale")
    actor = flow.worker(fl.Actor, warm, lr=lr, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS, name="actor")
    reward = flow.worker(fl.FunctionReward, arithmetic.exact_match, name="reward")

    @flow.program
    def stale(steps: int = steps):
        for step, batch in flow.steps(arithmetic.prompts(32, one_digit=1.0), steps):
            batch = actor.generate(batch, n=8)
            batch = reward.score(batch)
            batch = rl.advantages(batch)
            if name != "ppo_clip":
                batch = actor.logprobs(batch)
            metrics = actor.update(batch, loss=loss, epochs=2, allow_stale=not loss.corrects_stale)
            flow.log(step, metrics, reward=batch.rewards.mean(), version=batch.versions.mean())

    plan = Path(out) / "plan.yaml"
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(PLAN)
    flow.run(out=Path(out) / "run", plan=plan, seed=seed, quiet=True, overwrite=True, save_models=False)


def launch(name: str, seed: int, options: argparse.Namespace, warm: Path) -> dict[str, Any]:
    out = options.out / f"{name}-{seed}"
    words = [sys.executable, __file__, "--one", name, str(seed), "--warm", str(warm), "--out", str(out)]
    words += ["--steps", str(options.steps), "--lr", str(options.lr)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [line["reward"] for line in lines]
    lags = [line["step"] - line["version"] for line in lines]
    tenth = max(1, len(curve) // 10)
    return {
        "loss": name,
        "seed": seed,
        "last": round(sum(curve[-tenth:]) / tenth, 3),
        "lag": round(sum(lags[10:]) / len(lags[10:]), 2),
        "curve": [round(v, 3) for v in curve],
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 3.4))
    for name, colour in zip(LOSSES, ("#b3462e", "#0b6e8a", "#5a8f29"), strict=True):
        curves = [r["curve"] for r in runs if r["loss"] == name]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        for curve in curves:
            axis.plot(curve, color=colour, linewidth=0.5, alpha=0.35)
        axis.plot(mean, color=colour, linewidth=1.8, label=LOSSES[name])
    axis.set_xlabel("step")
    axis.set_ylabel("reward")
    axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=2, metavar=("LOSS", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stale")
    options = parser.parse_args()
    if options.one:
        train(options.one[0], int(options.one[1]), options.steps, options.lr, options.warm, str(options.out))
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from learn import warm_up

    warm = warm_up(ROOT / "runs" / "learn")
    jobs = [(name, seed) for seed in range(options.seeds) for name in LOSSES]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda job: launch(*job, options, warm), jobs))
    for name in LOSSES:
        mine = [r for r in runs if r["loss"] == name]
        lasts = ", ".join(f"{r['last']:.2f}" for r in mine)
        print(f"{name:16} reward at the end {lasts}; rows are {mine[0]['lag']:.1f} versions old")
    (ROOT / "docs" / "stale.json").write_text(
        json.dumps({"steps": options.steps, "lr": options.lr, "runs": runs}) + "\n"
    )
    draw(runs, ROOT / "docs" / "images" / "stale.png")


if __name__ == "__main__":
    main()
