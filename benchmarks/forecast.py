"""Steps of other plans on this machine, predicted from one run on two ranks, beside what they then take.

    python benchmarks/forecast.py [--steps 8] [--rounds 1] [--only WORD] [--vllm PYTHON] [--vllm-rounds 1]
                                   [--docs] [--keep DIR]

``flowrl run`` makes the one run that is calibrated by, for each engine, colocated on two ranks. ``flowrl simulate
--calibrated-by`` predicts a step of each other plan from it, and ``flowrl run`` runs it. Of what is predicted nothing
but its plan, its numbers of rows and its lengths are known. ``--vllm``: a Python that has vLLM. With ``--rounds`` each
is the median of so many runs, and predictions are from the calibrating run of the same round.

``--docs`` writes the table into ``docs/simulator.md``. Plans are such that no more ranks compute at a time than there
are cores: two idle cores are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from flowrl.analysis.measured_run import measured
from flowrl.analysis.prediction import steady_seconds
from flowrl.placement.plan.plan import Plan

DRIVER = ROOT / "benchmarks" / "forecast_driver.py"
PAGE = ROOT / "docs" / "simulator.md"
OPEN, CLOSE = "<!-- table: forecast, written by benchmarks/forecast.py -->", "<!-- end -->"
CALIBRATED_BY = "2 ranks, colocated"
STEPS = 29  # of the run that others are predicted from: two to warm up, and each of its sizes three times


@dataclass(frozen=True)
class Case:
    """A run: ``Case("1 + 1 ranks, S=1", train=1, rollout=1, staleness=1)``; ``rollout`` 0 is one pool for both.

    ``ends``: how many letters end a response; 0 has all of ``tokens``. With ``sizes`` steps differ: ``n`` rows of a
    prompt or up to so many times as many, of ``tokens`` or up to so many times as many.
    """

    name: str
    train: int
    rollout: int = 0
    staleness: int = 0
    prompts: int = 8
    tokens: int = 64
    engine: str = "hf"
    ends: int = 0
    n: int = 4
    sizes: int = 1

    def plan(self) -> str:
        """Return the plan as a file has it. The trainer shards its weights over its ranks, engines are replicas."""
        size = self.train + self.rollout
        pools = [("train", 0, self.train - 1), *([("rollout", self.train, size - 1)] if self.rollout else [])]
        options = ", kv_cache: 0.5, rows: 128" if self.engine == "vllm" else ""
        return "\n".join(
            [
                f"cluster: {{device: cpu, nodes: 1, devices_per_node: {size}}}",
                "pools:",
                *(f'  {name}: {{devices: "{first}-{last}"}}' for name, first, last in pools),
                "  cpu: {processes: 1}",
                "place:",
                "  actor:",
                f"    train:    {{pool: train, mesh: {{fsdp: {self.train}}}, backend: fsdp2}}",
                f"    generate: {{pool: {pools[-1][0]}, mesh: {{dp: {self.rollout or self.train}}}, "
                f"engine: {self.engine}{options}}}",
                "  reward: {pool: cpu}",
                f"pipeline: {{staleness: {self.staleness}, deadline: 600}}",
                "",
            ]
        )

    def words(self, steps: int) -> list[str]:
        """What the program is told."""
        said = {"steps": steps, "prompts-per-step": self.prompts, "n": self.n, "tokens": self.tokens}
        said |= {"ends": self.ends, "sizes": self.sizes}
        return [word for name, value in said.items() for word in (f"--{name}", str(value))]

    def lengths(self, run: Path) -> list[str]:
        """What the simulator is told of lengths: that of all rows, or how those of the run are distributed."""
        return ["--run", str(run)] if self.ends else ["--lengths", f"fixed:{self.tokens}"]


def cases(engine: str) -> list[Case]:
    """The runs of an engine, the one first that the others are predicted from."""
    made = [
        Case(CALIBRATED_BY, 2, n=2, tokens=40, sizes=3),
        Case("2 ranks, colocated, one length", 2),
        Case("2 ranks, colocated, twice as long", 2, tokens=128),
        Case("2 ranks, colocated, twice the rows", 2, prompts=16),
        Case("2 ranks, colocated, lengths vary", 2, ends=3, tokens=160),
        Case("1 rank, colocated", 1),
        Case("1 + 1 ranks", 1, 1),
        Case("1 + 1 ranks, S=1", 1, 1, staleness=1),
        Case("1 + 1 ranks, S=1, twice as long", 1, 1, staleness=1, tokens=128),
        Case("2 + 1 ranks", 2, 1),
        Case("1 + 2 ranks", 1, 2),
        Case("2 + 2 ranks", 2, 2),
        Case("2 + 2 ranks, twice the rows", 2, 2, prompts=16),
    ]
    if engine == "hf":
        return made
    left = ("2 ranks, colocated, one length", "2 ranks, colocated, twice as long", "1 + 1 ranks", "1 + 1 ranks, S=1")
    return [Case(**{**vars(c), "engine": engine}) for c in made if c.name in (CALIBRATED_BY, *left)]


@dataclass
class Found:
    """Seconds of a steady step of a case, by round."""

    predicted: list[float] = field(default_factory=list[float])
    measured: list[float] = field(default_factory=list[float])

    @property
    def off(self) -> float:
        """How far off the prediction is, as a part of what was measured."""
        return abs(median(self.predicted) / median(self.measured) - 1)


def call(python: str, words: Sequence[str], folder: Path) -> str:
    """Run a command of flowrl on the driver; return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [python, "-m", "flowrl", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def run(case: Case, python: str, steps: int, folder: Path) -> Path:
    """Run a case, unless its folder has the run; return the folder of the run."""
    if (folder / "run" / "timeline.html").exists():
        return folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "plan.yaml").write_text(case.plan())
    words = ["run", str(DRIVER), "--plan", "plan.yaml", "--runtime", "ray", "--out", "run", "--no-save"]
    call(python, [*words, "--checkpoint-every", "1000000", *case.words(steps)], folder)
    return folder / "run"


def took(case: Case, run: Path) -> float:
    """Seconds of a steady step of a run, as the simulator counts them."""
    found = measured(run, "forecast", Plan.load(run.parent / "plan.yaml"))
    assert found is not None, f"{case.name} has calls"
    return steady_seconds(found)


def predict(case: Case, by: Path, steps: int, folder: Path) -> float:
    """Seconds of a steady step that the simulator predicts from a run of another plan."""
    words = ["simulate", str(DRIVER), "--plan", str(folder / "plan.yaml"), "--runtime", "ray", "--format", "json"]
    words += ["--calibrated-by", str(by), *case.lengths(folder / "run"), *case.words(steps)]
    return json.loads(call(sys.executable, words, folder))["step_s"]


def one_round(engine: str, asked: argparse.Namespace, found: dict[Case, Found], out: Path) -> None:
    """Run the first case of an engine, then predict and run each other."""
    python = os.path.abspath(asked.vllm) if engine == "vllm" else sys.executable
    first, *others = cases(engine)
    by = run(first, python, STEPS, out / "by")
    print(call(sys.executable, ["calibrate", str(by), "--efficiency", "efficiency.yaml"], out), flush=True)
    for number, case in enumerate(others):
        if asked.only and asked.only not in case.name:
            continue
        folder = run(case, python, asked.steps, out / str(number))
        seconds = found.setdefault(case, Found())
        seconds.measured.append(took(case, folder))
        seconds.predicted.append(predict(case, by, asked.steps, folder.parent))
        print(f"{engine} {case.name}: {seconds.predicted[-1]:.3f} s, {seconds.measured[-1]:.3f} s", flush=True)


def table(found: dict[Case, Found]) -> list[str]:
    """The table of the page, with the errors below it."""
    lines = ["| engine | plan | rows of | predicted s | measured s | ratio |", "|---|---|---|---|---|---|"]
    for case, seconds in found.items():
        p, m = median(seconds.predicted), median(seconds.measured)
        rows = f"{case.n * case.prompts} x {'up to ' if case.ends else ''}{case.tokens}"
        lines.append(f"| {case.engine} | {case.name} | {rows} | {p:.3f} | {m:.3f} | {p / m:.2f} |")
    off = sorted(seconds.off for seconds in found.values())
    return [*lines, "", f"Off by {100 * median(off):.0f} % in the middle, {100 * off[-1]:.0f} % at most."]


def where(asked: argparse.Namespace) -> str:
    """What was measured on what."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    rounds = "1 round" if asked.rounds == 1 else f"medians of {asked.rounds} rounds"
    if asked.vllm and asked.vllm_rounds < asked.rounds:
        rounds += f" ({asked.vllm_rounds} of vllm)"
    machine = f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
    return f"Measured on {machine}, commit {commit}, {rounds} of {asked.steps} steps."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python with vLLM; without it only hf is looked at")
    parser.add_argument("--vllm-rounds", type=int, default=1, help="of these so many have vLLM too")
    parser.add_argument("--docs", action="store_true", help="write the page")
    parser.add_argument(
        "--keep", type=Path, help="keep the folders of the runs below this one; those that are there are not run again"
    )
    asked = parser.parse_args()
    out = asked.keep or Path(tempfile.mkdtemp())
    found: dict[Case, Found] = {}
    try:
        for number in range(asked.rounds):
            for engine in ("hf", *(["vllm"] if asked.vllm and number < asked.vllm_rounds else [])):
                one_round(engine, asked, found, out / f"{engine}-{number}")
    finally:
        if asked.keep is None:
            shutil.rmtree(out)
    lines = [*table(found), where(asked)]
    print("\n".join(lines))
    if asked.docs:
        before, rest = PAGE.read_text(encoding="utf-8").split(OPEN, 1)
        PAGE.write_text("\n".join([before + OPEN, "", *lines, "", CLOSE + rest.split(CLOSE, 1)[1]]), encoding="utf-8")


if __name__ == "__main__":
    main()
