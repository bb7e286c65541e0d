"""The self test of a machine: a tiny warm-up and a few steps of GRPO in each runtime, and by each backend."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...placement.backends import backend, names_of
from ...shipped import find_plan

SECONDS = 300  # of one runtime, at most: it takes 10 to 20 where nothing else runs, and an engine up to a minute
LINES = 20  # of what a process says at its end
WORDS = "--program warmup,grpo --warmup.steps 12 --warmup.rows 32 --grpo.steps 2 --prompts-per-step 4 --group-size 4"
#: What is tried, with the runtime and the shipped plan for it: runtimes, and backends that have a plan of their own.
PLANS = {"local": ("local", "one_process"), "ray": ("ray", "ranks_2_cpu")}
PLANS |= {name: ("ray", f"ranks_{name}_cpu") for name in names_of("train") if find_plan(f"ranks_{name}_cpu")}
#: Backends that only generate: one process trains, and such an engine samples the rows of its steps.
ENGINES = tuple(name for name in names_of("generate") if name not in names_of("train"))
TRIED = (*PLANS, *ENGINES)


@dataclass(frozen=True)
class Trial:
    """What became of a runtime or backend: ``Trial("ray", True, 19.2, "the loss falls from 2.77 to 2.35")``."""

    runtime: str
    passed: bool
    seconds: float
    said: str

    def line(self) -> str:
        """The verdict in a line."""
        return f"{self.runtime:<10}{'passed' if self.passed else 'FAILED'} in {self.seconds:.0f} s: {self.said}"


def try_runtime(runtime: str) -> Trial:
    """Train a tiny model on a runtime, or with a backend. What goes wrong is in what is returned."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flowrl-doctor-") as folder:
        passed, said = _run(runtime, Path(folder))
    return Trial(runtime, passed, time.monotonic() - began, said)


def engine_plan(engine: str) -> str:
    """Return the plan, as its file says it, of a process that trains beside an engine that generates.

    On the GPU where there is one and runs have the engine there.
    """
    device = "cpu" if backend(engine).cpu_alone else "auto"
    return f"""\
pools: {{train: {{device: {device}}}, rollout: {{device: {device}}}}}
place:
  actor:
    train:    {{pool: train}}
    generate: {{pool: rollout, engine: {engine}}}
"""


def _run(runtime: str, folder: Path) -> tuple[bool, str]:
    if runtime in ENGINES:
        how, plan = "local", folder / "plan.yaml"
        plan.write_text(engine_plan(runtime), encoding="utf-8")
    else:
        how, plan = PLANS[runtime][0], find_plan(PLANS[runtime][1])
    where = ["--runtime", how, "--plan", str(plan), "--out", str(folder / "run")]
    words = ["run", "grpo", *WORDS.split(), *where, "--no-save", "--quiet"]
    status, said = _said_by([sys.executable, "-P", "-m", "flowrl", *words], folder)
    if status is None:
        return False, "\n".join([f"no end after {SECONDS} s. Its process has said:", *said])
    if status:
        return False, "\n".join(["its process says:", *said])
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return _judge([json.loads(line) for line in lines], engine=runtime in ENGINES)


def _said_by(words: list[str], folder: Path) -> tuple[int | None, list[str]]:
    """Run a process; returns its status, None where it was ended as it took too long, and the last lines that it said.

    It leads a group of its own, which ends with it: engines start processes, too.
    """
    home = str(Path(__file__).parents[3])
    path = os.pathsep.join(p for p in (home, os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace").strip() for name in ("stderr", "stdout")]
    return status, (texts[0] or texts[1]).splitlines()[-LINES:]


def _judge(steps: list[Mapping[str, float | str | None]], engine: bool = False) -> tuple[bool, str]:
    """Return whether the steps of a run are those of one that learns, and in words what they show.

    ``engine``: rows were sampled by another engine than the trainer, whose log-probabilities are held against its own.
    """
    losses = [_number(step.get("loss")) for step in steps if step["program"] == "warmup"]
    rl = [step for step in steps if step["program"] == "grpo"]
    rewards = [_number(step.get("reward")) for step in rl]
    if (len(losses), len(rewards)) != (12, 2):
        return (
            False,
            f"{len(losses)} steps of the warm-up and {len(rewards)} of GRPO are recorded, and 12 and 2 were to be.",
        )
    if not all(map(math.isfinite, losses + rewards)):
        return False, f"a loss or a reward is not finite: {losses + rewards}."
    falls = f"the loss of {len(losses)} supervised steps goes from {losses[0]:.2f} to {losses[-1]:.2f}"
    if losses[-1] >= losses[0]:
        return False, f"{falls}: it does not fall."
    if not engine:
        return True, f"{falls}, {len(rewards)} steps of GRPO run."
    apart, bound = (max(_number(step.get(name)) for step in rl) for name in ("gap_max", "gap_bound"))
    tokens = sum(_number(step.get("gap_tokens")) for step in rl)
    gap = f"its log-probabilities and the trainer's are {apart:.2g} apart at most"
    if not apart <= bound:
        return False, f"{gap}, and {bound:.2g} is what their rounding explains."
    return True, f"{falls}, {len(rewards)} steps of GRPO run; it has sampled {tokens:g} tokens, and {gap}."


def _number(value: object) -> float:
    """A number of a record, where one that was not finite is null."""
    return float(value) if isinstance(value, (int, float)) else math.nan
