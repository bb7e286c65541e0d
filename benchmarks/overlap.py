"""How well training and generation overlap on two cores, beside what the simulator had predicted from a run without.

    python benchmarks/overlap.py [--rounds 3] [--steps 16] [--runtime ray] [--docs]

Six runs of ``overlap_driver.py`` in turns, so many rounds of them: one step after another (S=0) and one step apart
(S=1), with responses of one length, and with log-normal ones of two kinds, where publishes interrupt. The costs of a
prediction are calibrated by the run with S=0 of the same round; nothing of the run that is predicted goes into it.
``ideal`` is the longer of generate with publish and all else, as S=0 measured them. Medians over rounds.

``--docs`` writes the table into ``docs/schedule.md``, and ``docs/images/overlap.svg``, which has some steps of the last
round, measured and simulated. Two idle cores are needed: the ranks have one each.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from flowrl.analysis.measured_run import measured, tokens_of_run
from flowrl.analysis.row_lengths import Tokens
from flowrl.placement.cost.calibrate_run import calibrate
from flowrl.placement.cost.calibrated_costs import Calibrated
from flowrl.schedule.simulation import Bar, Simulation

PAGE, PICTURE = ROOT / "docs" / "schedule.md", ROOT / "docs" / "images" / "overlap.svg"
OPEN, CLOSE = "<!-- table: overlap, written by benchmarks/overlap.py -->", "<!-- end -->"
WARM = 3  # steps at the beginning that are left out
COLOURS = {"actor.generate": "#0b6e8a", "actor.publish": "#5a8f29", "actor.update": "#b3462e"}


@dataclass(frozen=True)
class Kind:
    """A pair of runs: ``Kind("one length", "drain")``. ``publish`` is that of S=1, ``sigma`` of log-normal lengths."""

    name: str
    publish: str
    sigma: float = 0.0


KINDS = (
    Kind("one length", "drain"),
    Kind("log-normal, 0.7", "interrupt", sigma=0.7),  # the longest of 64 has 5 times as many tokens as the median
    Kind("log-normal, 1.0", "interrupt", sigma=1.0),  # 10 times
)


@dataclass(frozen=True)
class Pair:
    """What a round has found of a kind: seconds of a steady step, measured and predicted, and the ideal one."""

    alone: float  # S=0
    apart: float  # S=1
    alone_predicted: float
    apart_predicted: float
    ideal: float
    parts: dict[str, float]  # seconds of each op of a step at S=0


def words(kind: Kind, staleness: int, asked: argparse.Namespace) -> list[str]:
    """What the driver is told."""
    publish = kind.publish if staleness else "drain"
    said = ["--staleness", str(staleness), "--publish", publish, "--steps", str(asked.steps)]
    more = ["--sigma", str(kind.sigma)] if kind.sigma else []
    return [*said, "--epochs", str(asked.epochs), "--runtime", asked.runtime, *more]


def run(kind: Kind, staleness: int, asked: argparse.Namespace, out: Path) -> Path:
    """Run the driver in a process of its own; return the folder of the run."""
    folder = out / f"{kind.sigma}-{staleness}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    driver = str(ROOT / "benchmarks" / "overlap_driver.py")
    command = [sys.executable, driver, str(folder), *words(kind, staleness, asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return folder


def steady(bars: tuple[Bar, ...], staleness: int) -> float:
    """Seconds from the end of one update to that of the next, without those at the beginning and, where steps overlap,
    the last one, beside which nothing is generated any more."""
    ends = [bar.end for bar in sorted(bars, key=lambda bar: bar.step) if bar.node == "actor.update"]
    kept = ends[WARM : len(ends) - 1 if staleness else None]
    return (kept[-1] - kept[0]) / (len(kept) - 1)


def predict(kind: Kind, staleness: int, asked: argparse.Namespace, costs: Calibrated, tokens: Tokens) -> Simulation:
    """Simulate a run with the costs and the lengths of another one."""
    from overlap_driver import flow, plan

    publish = kind.publish if staleness else "drain"
    made = plan(staleness, publish, asked.runtime)
    parameters = {"steps": asked.steps, "epochs": asked.epochs}
    return flow.study(made, "overlap", costs=costs, tokens=tokens, runtime=asked.runtime, **parameters).simulate()


def one_round(kind: Kind, asked: argparse.Namespace, out: Path) -> tuple[Pair, Simulation, Simulation]:
    """Both runs of a kind, with S=1 as it was measured and as it was predicted."""
    from overlap_driver import plan

    alone, apart = (run(kind, staleness, asked, out) for staleness in (0, 1))
    costs = calibrate(alone)
    print(f"\n{kind.name}, S=0\n{costs.report()}", flush=True)
    tokens = tokens_of_run(alone, "overlap") if kind.sigma else Tokens()
    found = [measured(folder, "overlap", plan(s, "drain", asked.runtime)) for s, folder in enumerate((alone, apart))]
    assert found[0] is not None and found[1] is not None, "both runs have calls"
    flown = [predict(kind, staleness, asked, costs, tokens) for staleness in (0, 1)]
    parts: dict[str, list[float]] = {}
    for bar in found[0].bars:
        if bar.step >= WARM:
            parts.setdefault(bar.node, []).append(bar.end - bar.start)
    each = {node: median(seconds) for node, seconds in parts.items()}
    sampling = each["actor.generate"] + each.get("actor.publish", 0.0)
    rest = sum(each.values()) - sampling
    seconds = (steady(found[0].bars, 0), steady(found[1].bars, 1), steady(flown[0].bars, 0), steady(flown[1].bars, 1))
    return Pair(*seconds, max(sampling, rest), each), found[1], flown[1]


def table(pairs: dict[Kind, list[Pair]]) -> list[str]:
    """The table of the page, a line per run."""
    lines = ["| responses | run | measured s | predicted s | ratio | of the ideal | steps per second, to S=0 |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for kind, rounds in pairs.items():
        for staleness, publish in ((0, "drain"), (1, kind.publish)):
            took = [(p.apart, p.apart_predicted) if staleness else (p.alone, p.alone_predicted) for p in rounds]
            ratio = median(m / p for m, p in took)
            ideal = f"{100 * median(p.ideal / p.apart for p in rounds):.0f} %" if staleness else ""
            faster = f"{median(p.alone / p.apart for p in rounds):.2f}" if staleness else "1"
            seconds = " | ".join(f"{median(s):.3f}" for s in zip(*took, strict=True))
            lines.append(f"| {kind.name} | S={staleness}, {publish} | {seconds} | {ratio:.2f} | {ideal} | {faster} |")
    return lines


def where(asked: argparse.Namespace) -> str:
    """What was measured on what."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    machine = f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
    rounds = "1 round" if asked.rounds == 1 else f"{asked.rounds} rounds"
    return f"{machine}, commit {commit.stdout.strip()}, {rounds} of {asked.steps} steps, {asked.runtime}"


def parts_in_words(pairs: dict[Kind, list[Pair]]) -> str:
    """What a step with S=0 is made of."""
    said: list[str] = []
    for kind, rounds in pairs.items():
        nodes = dict.fromkeys(node for p in rounds for node in p.parts)
        each = (f"{node} {median(p.parts.get(node, 0.0) for p in rounds):.3f} s" for node in nodes)
        said.append(f"{kind.name}: {', '.join(each)}")
    return "; ".join(said)


def draw(shown: dict[Kind, tuple[Simulation, Simulation]], path: Path) -> None:
    """Some steps of each kind, the measured ones over the simulated ones."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "overlap"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(shown), 1, figsize=(7.2, 2.0 * len(shown)), squeeze=False)
    for axis, (kind, pair) in zip(axes[:, 0], shown.items(), strict=True):
        for place, (simulation, name) in enumerate(zip(pair, ("measured", "simulated"), strict=True)):
            draw_bars(axis, simulation, top=-3 * place)
            axis.annotate(name, (0, 0.5 - 3 * place), xytext=(3, 1), textcoords="offset points", fontsize=7)
        axis.set_xlim(0, 5 * max(steady(simulation.bars, 1) for simulation in pair))
        axis.set_ylim(-4.6, 1.3)  # with room for a line of text above each pair of lanes
        axis.set_yticks([0, -1, -3, -4], ["rollout", "train"] * 2, fontsize=7)
        axis.set_title(f"{kind.name}, S=1, {kind.publish}", fontsize=8, loc="left")
        axis.tick_params(axis="x", labelsize=7)
    axes[-1, 0].set_xlabel("seconds", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_bars(axis: Any, simulation: Simulation, *, top: int) -> None:
    """What the pools did from the end of the first steady update on: the lane at ``top`` and the one below it."""
    first = min(b.end for b in simulation.bars if b.node == "actor.update" and b.step >= WARM)
    look: dict[str, Any] = {"height": 0.8, "alpha": 0.8, "edgecolor": "white", "linewidth": 0.5}
    for bar in simulation.bars:
        lane, colour = top - (bar.pool == "train"), COLOURS.get(bar.node, "#999999")
        axis.barh(lane, bar.end - bar.start, left=bar.start - first, color=colour, **look)


def write(lines: list[str]) -> None:
    """Put lines between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(OPEN, 1)
    after = rest.split(CLOSE, 1)[1]
    PAGE.write_text("\n".join([before + OPEN, "", *lines, "", CLOSE + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1, help="of an update: as many as make it as long as a generate")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="only these responses")
    parser.add_argument("--docs", action="store_true", help="write the page and the picture")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs below this one")
    asked = parser.parse_args()
    out = asked.keep or Path(tempfile.mkdtemp())
    pairs: dict[Kind, list[Pair]] = {}
    shown: dict[Kind, tuple[Simulation, Simulation]] = {}
    try:
        for number in range(asked.rounds):
            for kind in KINDS:
                if asked.kind in (None, kind.name):
                    pair, real, flown = one_round(kind, asked, out / str(number))
                    pairs.setdefault(kind, []).append(pair)
                    shown[kind] = real, flown
    finally:
        if asked.keep is None:
            shutil.rmtree(out)
    lines = table(pairs)
    print("\n" + "\n".join([where(asked), *lines, parts_in_words(pairs)]))
    if asked.docs:
        draw(shown, PICTURE)
        alt = "The pools over some steps, measured and simulated"
        said = f"Measured on {where(asked)}. With S=0 these took, {parts_in_words(pairs)}."
        write([*lines, "", said, "", f"![{alt}](images/{PICTURE.name})"])


if __name__ == "__main__":
    main()
