"""The self test of a machine: a tiny warm-up and a few steps of GRPO in each runtime, and by each backend for CPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...placement.backends import names_of
from ...shipped import find_plan

SECONDS = 300  # of one runtime, at most: it takes 10 to 20 where nothing else runs
WORDS = "--program warmup,grpo --warmup.steps 12 --warmup.rows 32 --grpo.steps 2 --prompts-per-step 4 --group-size 4"
#: What is tried, with the runtime and the shipped plan for it: runtimes, and backends that have a plan of their own.
PLANS = {"local": ("local", "one_process"), "ray": ("ray", "ranks_2_cpu")}
PLANS |= {name: ("ray", f"ranks_{name}_cpu") for name in names_of("train") if find_plan(f"ranks_{name}_cpu")}


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


def _run(runtime: str, folder: Path) -> tuple[bool, str]:
    words = [
        sys.executable,
        "-m",
        "flowrl",
        "run",
        "grpo",
        *WORDS.split(),
        "--runtime",
        PLANS[runtime][0],
        "--no-save",
        "--quiet",
    ]
    words += ["--plan", str(find_plan(PLANS[runtime][1])), "--out", str(folder / "run")]
    home = str(Path(__file__).parents[3])
    path = os.pathsep.join(p for p in (home, os.environ.get("PYTHONPATH")) if p)
    try:
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {SECONDS} s."
    if done.returncode:
        return False, "\n".join(["its process says:", *(done.stderr or done.stdout).strip().splitlines()[-20:]])
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return _judge([json.loads(line) for line in lines])


def _judge(steps: list[Mapping[str, float | str]]) -> tuple[bool, str]:
    """Return whether the steps of a run are those of one that learns, and in words what they show."""
    losses = [float(step["loss"]) for step in steps if step["program"] == "warmup"]
    rewards = [float(step["reward"]) for step in steps if step["program"] == "grpo"]
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
    return True, f"{falls}, {len(rewards)} steps of GRPO run."
