"""What correcting for stale rows is worth: a program four steps ahead, with losses that correct and one that does not.

    python benchmarks/stale.py [--seeds 5] [--steps 400] [--lr 1e-4] [--no-falling] [--only truncated] [--dry]

It trains one-digit sums under a plan with staleness 4, so that in the steady state every row is four versions old, and
with staleness 0 for comparison; each run has one core, two run at a time. Runs that are done stay in ``--out``: a call
that was ended goes on. It writes ``docs/stale.json`` and ``docs/images/stale.png``, unless ``--dry``; then ``python
docs/make_algorithms.py`` writes the page. The uncorrected loss takes its ratio to the policy just before the update,
recomputed, as if that had sampled; flowrl refuses it for stale rows unless the update says ``allow_stale=True``.
``truncated`` is that ratio times importance weights, of the policy before the update over the one that sampled, of 2 at
most.
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
pipeline: {staleness: STALENESS}
"""
AGES = {"S=0": 0, "uncorrected": 4, "ppo_clip": 4, "decoupled_ppo": 4, "truncated": 4}  # staleness of the plan
COLOURS = dict(zip(AGES, ("#555555", "#b3462e", "#0b6e8a", "#5a8f29", "#8a5fb0"), strict=True))


def train(name: str, seed: int, steps: int, lr: float, falling: bool, warm: str, out: str) -> None:
    """One run, in this process."""
    sys.path.insert(0, str(ROOT / "algorithms"))
    import flowrl as fl
    from flowrl import rl
    from tasks import arithmetic

    loss = {
        "S=0": rl.ppo_clip(),
        "uncorrected": rl.ppo_clip(anchor="old"),
        "ppo_clip": rl.ppo_clip(),
        "decoupled_ppo": rl.decoupled_ppo(),
        "truncated": rl.ppo_clip(anchor="old", correction=rl.correct("token", "truncate", high=2.0)),
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
            if name not in ("S=0", "ppo_clip"):
                batch = actor.logprobs(batch)
            rate = lr * (1 - step / steps) if falling else lr
            metrics = actor.update(batch, loss=loss, epochs=2, lr=rate, allow_stale=not loss.corrects_stale)
            flow.log(step, metrics, reward=batch.rewards.mean(), version=batch.versions.mean())

    plan = Path(out) / "plan.yaml"
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(PLAN.replace("STALENESS", str(AGES[name])))
    flow.run(out=Path(out) / "run", plan=plan, seed=seed, quiet=True, overwrite=True, save_models=False)


def launch(name: str, seed: int, options: argparse.Namespace, warm: Path) -> dict[str, Any]:
    out = options.out / f"{name}-{seed}"
    asked = {"steps": options.steps, "lr": options.lr, "falling": options.falling}
    kept = out / "result.json"
    if kept.exists() and (found := json.loads(kept.read_text()))["asked"] == asked:
        return found["result"]
    words = [sys.executable, __file__, "--one", name, str(seed), "--warm", str(warm), "--out", str(out)]
    words += ["--steps", str(options.steps), "--lr", str(options.lr)]
    words += ["--falling" if options.falling else "--no-falling"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [line["reward"] for line in lines]
    lags = [line["step"] - line["version"] for line in lines]
    lags = lags[10:] or lags  # at the start rows cannot be as old
    tenth = max(1, len(curve) // 10)
    result = {
        "loss": name,
        "seed": seed,
        "last": round(sum(curve[-tenth:]) / tenth, 3),
        "lag": round(sum(lags) / len(lags), 2),
        "curve": [round(v, 3) for v in curve],
    }
    kept.write_text(json.dumps({"asked": asked, "result": result}) + "\n")
    return result


def smooth(curve: list[float], over: int = 5) -> list[float]:
    """Means over the last few steps."""
    return [sum(part) / len(part) for part in (curve[max(0, i + 1 - over) : i + 1] for i in range(len(curve)))]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 3.4))
    for name in dict.fromkeys(r["loss"] for r in runs):
        steps = list(zip(*(smooth(r["curve"]) for r in runs if r["loss"] == name), strict=True))
        low, high = [min(values) for values in steps], [max(values) for values in steps]
        axis.fill_between(range(len(steps)), low, high, color=COLOURS[name], alpha=0.12, linewidth=0)
        axis.plot([sum(values) / len(values) for values in steps], color=COLOURS[name], linewidth=1.8, label=name)
    axis.set_xlabel("step")
    axis.set_ylabel("reward")
    axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("LOSS", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--falling", action=argparse.BooleanOptionalAction, default=True, help="the learning rate falls to 0 in a line"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default=",".join(AGES), help="which of them, with commas between")
    parser.add_argument("--at-once", type=int, default=2, help="runs, with a core each")
    parser.add_argument("--dry", action="store_true", help="write nothing into docs/")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stale")
    options = parser.parse_args()
    if options.one:
        name, seed = options.one
        train(name, int(seed), options.steps, options.lr, options.falling, options.warm, str(options.out))
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from learn import warm_up

    warm = warm_up(ROOT / "runs" / "learn")
    names = options.only.split(",")
    jobs = [(name, seed) for seed in range(options.seeds) for name in names]
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = list(pool.map(lambda job: launch(job[0], job[1], options, warm), jobs))
    for name in names:
        mine = [r for r in runs if r["loss"] == name]
        lasts = ", ".join(f"{r['last']:.2f}" for r in mine)
        mean = sum(r["last"] for r in mine) / len(mine)
        print(f"{name:16} reward at the end {lasts}; mean {mean:.2f}; rows are {mine[0]['lag']:.1f} versions old")
    if options.dry:
        return
    (ROOT / "docs" / "stale.json").write_text(
        json.dumps({"steps": options.steps, "lr": options.lr, "falling": options.falling, "runs": runs}) + "\n"
    )
    draw(runs, ROOT / "docs" / "images" / "stale.png")


if __name__ == "__main__":
    main()
