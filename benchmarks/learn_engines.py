"""The same GRPO with every engine that samples beside every backend that trains: rewards over steps, and the gap.

    make vllm; .venv-vllm/bin/python benchmarks/learn_engines.py --only hf-hf --only hf-vllm

``algorithms/grpo.py`` runs unchanged, by plans that differ in their engine and backend alone, and from one warm-up:
with ``hf`` in this process, with ``fsdp2`` and ``megatron`` on ranks. Results go to ``docs/learning_engines.json``
as soon as a run ends: what is there already, with as many steps and prompts, is not run again unless ``--again`` says
so, and ``--minutes`` begins no other run after that time. So the same command goes on where it was ended.

The picture is ``docs/images/engines.png``: by backend a line for the mean over the seeds of each engine, and a band
from the lowest to the highest. It shows what was run with so many steps, and nothing else. Then two tables of it are
printed and written into ``docs/engines.md``: the mean reward of the last tenth by seed, and how far the trainer's
log-probabilities of sampled tokens were from the engine's; and what an engine has more than ``hf`` with the same seed,
beside what seeds differ by. ``--draw`` does this with the results that are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from learn import ONE_DIGIT, ROOT, warm_up

sys.path.insert(0, str(ROOT / "tests" / "algorithms"))
from engine_runs import COPIES, FSDP2, MEGATRON, SPLIT, WHOLE, local, ranks

RESULTS, PICTURE = ROOT / "docs" / "learning_engines.json", ROOT / "docs" / "images" / "engines.png"
PAGE, BEGIN, END = (
    ROOT / "docs" / "engines.md",
    "<!-- learned: written by benchmarks/learn_engines.py -->",
    "<!-- end -->",
)
#: What stands beside the pool that trains; ``hf`` is in one process.
BACKENDS = {"hf": "", "fsdp2": FSDP2, "megatron": MEGATRON}
_VLLM = "vllm, kv_cache: 0.25, rows: 128"
#: By name: the engine as the plan says it, and its layout on ranks.
ENGINES = {"hf": ("hf", WHOLE), "vllm": (_VLLM, WHOLE), "vllm-dp2": (_VLLM, COPIES), "vllm-tp2": (_VLLM, SPLIT)}
CASES = [(b, e) for b in BACKENDS for e in ENGINES if b != "hf" or e in ("hf", "vllm")]
COLORS = {"hf": "#555555", "vllm": "#0b6e8a", "vllm-dp2": "#c4572e", "vllm-tp2": "#5a8f29"}


def launch(backend: str, engine: str, seed: int, options: argparse.Namespace, warm: Path) -> dict[str, Any]:
    """Run it in processes of its own; gives its curve, the gap and how long it took."""
    out = options.out / f"{backend}-{engine}-{seed}"
    said, layout = ENGINES[engine]
    plan, runtime = out.with_suffix(".yaml"), "local" if backend == "hf" else "ray"
    plan.write_text(local(said) if backend == "hf" else ranks(BACKENDS[backend], said, layout))
    words = [sys.executable, str(ROOT / "algorithms" / "grpo.py"), "--runtime", runtime, "--plan", str(plan)]
    words += ["--out", str(out), "--overwrite", "--quiet", "--no-save", "--seed", str(seed), "--model", f"actor={warm}"]
    words += ["--steps", str(options.steps), "--prompts-per-step", str(options.prompts), "--lr", "2e-4", *ONE_DIGIT]
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        return {"backend": backend, "engine": engine, "seed": seed, "error": (done.stderr or done.stdout)[-2000:]}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def column(name: str) -> list[float]:
        return [v for line in lines for k, v in line.items() if k.endswith(name) and math.isfinite(v)]

    return {
        "backend": backend,
        "engine": engine,
        "seed": seed,
        "steps": options.steps,
        "prompts": options.prompts,
        "seconds": round(time.perf_counter() - began),
        "gap_mean": statistics.fmean(column("gap_mean")),
        "gap_max": max(column("gap_max")),
        "reward": [round(line["reward"], 4) for line in lines],
    }


def title(result: dict[str, Any]) -> tuple[str, str, int]:
    """What was run: the backend, the engine and the seed."""
    return result["backend"], result["engine"], result["seed"]


def alike(result: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether it has as many steps and prompts."""
    return (result["steps"], result["prompts"]) == (options.steps, options.prompts)


def draw(results: list[dict[str, Any]]) -> None:
    """A picture for each backend: of each engine the mean over the seeds, and from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [b for b in BACKENDS if any(r["backend"] == b for r in results)]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.2 * len(shown), 2.9), squeeze=False, sharey=True)
    for axis, backend in zip(axes.flat, shown, strict=True):
        for engine in ENGINES:
            curves = [smooth(r["reward"]) for r in results if (r["backend"], r["engine"]) == (backend, engine)]
            if not curves:
                continue
            steps = list(zip(*curves, strict=True))
            label = f"{engine}, {len(curves)} seed{'s' if len(curves) > 1 else ''}"
            axis.plot([statistics.fmean(s) for s in steps], color=COLORS[engine], linewidth=1.2, label=label)
            axis.fill_between(
                range(len(steps)), list(map(min, steps)), list(map(max, steps)), color=COLORS[engine], alpha=0.15
            )
        axis.set_title(f"training with {backend}", fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7, loc="lower right")
    axes[0][0].set_ylabel("reward", fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)
    pyplot.close(figure)


def smooth(curve: list[float], window: int = 5) -> list[float]:
    """The mean of each value and those before it."""
    return [statistics.fmean(curve[max(0, i - window + 1) : i + 1]) for i in range(len(curve))]


def table(results: list[dict[str, Any]]) -> str:
    """What was found, as Markdown: a line for each backend and engine."""
    lines = [
        "| trains | samples | steps | reward at the end, by seed | gap, mean | gap, largest | seconds |",
        "|" + "---|" * 7,
    ]
    for backend, engine in CASES:
        mine = [r for r in results if (r["backend"], r["engine"]) == (backend, engine)]
        if mine:
            rewards = ", ".join(f"{at_the_end(r):.3f}" for r in mine)
            mean, most = statistics.fmean(r["gap_mean"] for r in mine), max(r["gap_max"] for r in mine)
            seconds = round(statistics.fmean(r["seconds"] for r in mine))
            lines.append(
                f"| `{backend}` | `{engine}` | {mine[0]['steps']} | {rewards} | {mean:.1e} | {most:.1e} | {seconds} |"
            )
    return "\n".join(lines)


def differences(results: list[dict[str, Any]]) -> str:
    """What each engine has more than ``hf`` at the end, by seed, and how far seeds of ``hf`` lie apart, as Markdown."""
    found = {title(r): at_the_end(r) for r in results}
    lines = ["| trains | samples | more than `hf`, by seed | mean | seeds of `hf` lie apart by |", "|" + "---|" * 5]
    for backend, engine in CASES:
        seeds = [s for b, e, s in found if (b, e) == (backend, engine) and (b, "hf", s) in found]
        if engine == "hf" or not seeds:
            continue
        more = [found[backend, engine, s] - found[backend, "hf", s] for s in seeds]
        of_hf = [value for (b, e, _), value in found.items() if (b, e) == (backend, "hf")]
        words = f"{', '.join(f'{m:+.3f}' for m in more)} | {statistics.fmean(more):+.3f}"
        lines.append(f"| `{backend}` | `{engine}` | {words} | {max(of_hf) - min(of_hf):.3f} |")
    return "\n".join(lines)


def at_the_end(result: dict[str, Any]) -> float:
    """The mean reward of the last tenth of the steps."""
    return statistics.fmean(result["reward"][-max(1, len(result["reward"]) // 10) :])


def main() -> int:
    parser = argparse.ArgumentParser(description="GRPO with every engine beside every backend")
    known = ", ".join(f"{b}-{e}" for b, e in CASES)
    parser.add_argument("--only", action="append", default=[], metavar="BACKEND-ENGINE", help=f"one of {known}")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of each (3)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step (32)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "engines", help="folder of the runs")
    parser.add_argument("--again", action="store_true", help="run again what is there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other run after so many")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw and print what is there")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or "-".join(case) in options.only]
    if len(cases) < len(options.only):
        parser.error(f"--only takes {known}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    failed, ends = 0, time.monotonic() + 60 * options.minutes
    there = set() if options.again else {title(r) for r in results if alike(r, options)}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed, (backend, engine) in () if options.draw else itertools.product(seeds, cases):
        if (backend, engine, seed) in there:
            continue
        if time.monotonic() > ends:
            print("The time is over; the same command goes on from here.")
            break
        found = launch(backend, engine, seed, options, warm_up(options.out))
        name = f"{backend}-{engine} seed {seed}"
        if "error" in found:
            failed += 1
            print(f"{name}: FAILED\n{found['error']}", flush=True)
            continue
        print(f"{name}: reward {at_the_end(found):.3f} at the end, {found['seconds']} s", flush=True)
        results = [r for r in results if title(r) != title(found) or not alike(r, options)] + [found]
        results.sort(key=lambda r: (CASES.index((r["backend"], r["engine"])), r["seed"]))
        RESULTS.write_text(json.dumps({"runs": results}) + "\n")
    if shown := [r for r in results if alike(r, options)]:
        draw(shown)
        tables = f"{table(shown)}\n\n{differences(shown)}"
        print(tables)
        text = PAGE.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
