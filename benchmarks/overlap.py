"""How well training and generation overlap on two cores, beside what the simulator had predicted from a run without.

    python benchmarks/overlap.py [--rounds 3] [--steps 16] [--runtime ray] [--docs]
    python benchmarks/overlap.py --paced [--rounds 3] [--steps 16] [--docs]

Nine runs of ``overlap_driver.py`` in turns, so many rounds of them: one step after another (S=0) and one step apart
(S=1), with responses of one length, and with log-normal ones of two kinds, where publishes interrupt. The costs of a
prediction are calibrated by a run with S=0 of the same round; nothing of the run that is predicted goes into it.
``ideal`` is the longer of generate with publish and all else, as S=0 measured them. Medians over rounds.

With S=0 one rank works and the other waits, so a core has the machine to itself. Two cores share memory and caches, and
virtual ones are often halves of one: they take longer when both work, as they do with S=1. So there is a run with S=0
in which both cores are busy: the one that waits has a program that trains a network, and that gives way to a rank at
once (``SCHED_IDLE``).

With ``--paced`` a rank waits after each computation, as the core of a GPU does, so that pools share nothing: six runs.

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
from collections.abc import Iterator
from contextlib import contextmanager
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

PAGE, IMAGES = ROOT / "docs" / "schedule.md", ROOT / "docs" / "images"
OPEN, CLOSE = "<!-- table: {}, written by benchmarks/overlap.py -->", "<!-- end -->"
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
class Base:
    """What a run with S=0 has shown, and what is predicted by it: seconds of a steady step."""

    took: float
    predicted: float
    apart: float  # with S=1, as predicted
    ideal: float
    parts: dict[str, float]  # seconds of each op


@dataclass(frozen=True)
class Round:
    """What a round has found of a kind: S=0, by what else the cores did, and seconds of a step with S=1."""

    bases: dict[str, Base]
    took: float


def words(kind: Kind, staleness: int, asked: argparse.Namespace) -> list[str]:
    """What the driver is told."""
    publish = kind.publish if staleness else "drain"
    said = ["--staleness", str(staleness), "--publish", publish, "--steps", str(asked.steps)]
    more = ["--sigma", str(kind.sigma)] if kind.sigma else []
    return [*said, "--epochs", str(asked.epochs), "--runtime", asked.runtime, *more, *["--paced"] * asked.paced]


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


TRAIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
import torch
torch.set_num_threads(1)
weights = [torch.randn(1024, 192, requires_grad=True) for _ in range(8)]
rows = torch.randn(4000, 192)
while True:
    hidden = rows
    for weight in weights:
        hidden = (hidden @ weight.T)[:, :192].relu()
    hidden.sum().backward()
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Have each core train a network wherever nothing else wants it."""
    cores = sorted(os.sched_getaffinity(0))
    training = [subprocess.Popen([sys.executable, "-c", TRAIN, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in training:
            process.kill()
            process.wait()


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


def base(kind: Kind, asked: argparse.Namespace, folder: Path) -> tuple[Base, Simulation]:
    """What a run with S=0 took, and what its costs predict; with S=1 as it was simulated."""
    from overlap_driver import plan

    costs = calibrate(folder)
    print(f"\n{kind.name}, {folder.parent.name}\n{costs.report()}", flush=True)
    tokens = tokens_of_run(folder, "overlap") if kind.sigma else Tokens()
    found = measured(folder, "overlap", plan(0, "drain", asked.runtime))
    assert found is not None, "the run has calls"
    parts: dict[str, list[float]] = {}
    for bar in found.bars:
        if bar.step >= WARM:
            parts.setdefault(bar.node, []).append(bar.end - bar.start)
    each = {node: median(seconds) for node, seconds in parts.items()}
    sampling = each["actor.generate"] + each.get("actor.publish", 0.0)
    rest = sum(each.values()) - sampling
    alone, apart = (predict(kind, staleness, asked, costs, tokens) for staleness in (0, 1))
    seconds = steady(found.bars, 0), steady(alone.bars, 0), steady(apart.bars, 1)
    return Base(*seconds, max(sampling, rest), each), apart


def one_round(kind: Kind, asked: argparse.Namespace, out: Path) -> tuple[Round, Simulation, Simulation]:
    """The runs of a kind, with S=1 as it was measured and as it was predicted."""
    from overlap_driver import plan

    name = "devices that wait" if asked.paced else "one busy core"
    bases = {}
    bases[name], flown = base(kind, asked, run(kind, 0, asked, out / name))
    if not asked.paced:
        with busy_cores():
            bases["two"], flown = base(kind, asked, run(kind, 0, asked, out / "two"))
    found = measured(run(kind, 1, asked, out / "apart"), "overlap", plan(1, "drain", asked.runtime))
    assert found is not None, "the run has calls"
    return Round(bases, steady(found.bars, 1)), found, flown


def by_base(rounds: list[Round]) -> Iterator[tuple[str, list[tuple[float, Base]]]]:
    """Yield what else the cores did with S=0, and for each round seconds of a step with S=1 and that base."""
    for name in rounds[0].bases:
        yield name, [(one.took, one.bases[name]) for one in rounds]


def table(found: dict[Kind, list[Round]]) -> list[str]:
    """The table of the page, a line for each kind of run with S=0."""
    lines = ["| responses | S=1 | S=0, with | S=0 s | predicted | S=1 s | predicted | of the ideal | faster by |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for kind, rounds in found.items():
        for name, pairs in by_base(rounds):
            alone, alone_predicted = median(b.took for _, b in pairs), median(b.predicted / b.took for _, b in pairs)
            apart, apart_predicted = median(took for took, _ in pairs), median(b.apart / took for took, b in pairs)
            ideal, faster = median(b.ideal / took for took, b in pairs), median(b.took / took for took, b in pairs)
            said = f"{alone:.3f} | {alone_predicted:.2f}x | {apart:.3f} | {apart_predicted:.2f}x"
            lines.append(f"| {kind.name} | {kind.publish} | {name} | {said} | {100 * ideal:.0f} % | {faster:.2f}x |")
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


def parts_in_words(found: dict[Kind, list[Round]]) -> str:
    """What a step with S=0 is made of."""
    said: list[str] = []
    for kind, rounds in found.items():
        for name, pairs in by_base(rounds):
            nodes = dict.fromkeys(node for _, base in pairs for node in base.parts)
            each = (f"{node} {median(b.parts.get(node, 0.0) for _, b in pairs):.3f} s" for node in nodes)
            said.append(f"{kind.name}, {name}: {', '.join(each)}")
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


def write(name: str, lines: list[str]) -> None:
    """Put lines between the marks of the page that have this name."""
    text, opens = PAGE.read_text(encoding="utf-8"), OPEN.format(name)
    before, rest = text.split(opens, 1)
    after = rest.split(CLOSE, 1)[1]
    PAGE.write_text("\n".join([before + opens, "", *lines, "", CLOSE + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1, help="of an update: as many as make it as long as a generate")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="only these responses")
    parser.add_argument("--paced", action="store_true", help="ranks wait as for devices that share nothing")
    parser.add_argument("--docs", action="store_true", help="write the page and the picture")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs below this one")
    asked = parser.parse_args()
    out = asked.keep or Path(tempfile.mkdtemp())
    found: dict[Kind, list[Round]] = {}
    shown: dict[Kind, tuple[Simulation, Simulation]] = {}
    try:
        for number in range(asked.rounds):
            for kind in KINDS:
                if asked.kind in (None, kind.name):
                    one, real, flown = one_round(kind, asked, out / str(number))
                    found.setdefault(kind, []).append(one)
                    shown[kind] = real, flown
    finally:
        if asked.keep is None:
            shutil.rmtree(out)
    lines = table(found)
    print("\n" + "\n".join([where(asked), *lines, parts_in_words(found)]))
    if asked.docs:
        name = "overlap_paced" if asked.paced else "overlap"
        draw(shown, IMAGES / f"{name}.svg")
        alt = "The pools over some steps, measured and simulated"
        said = f"Measured on {where(asked)}. With S=0 a step took, by what else cores did: {parts_in_words(found)}."
        write(name, [*lines, "", said, "", f"![{alt}](images/{name}.svg)"])


if __name__ == "__main__":
    main()
