"""What it costs to watch a run: the demo with everything recorded and followed beside the same run with nothing.

    python benchmarks/watching.py --parts     # CPU of a step that goes into each part of it, in this process
    python benchmarks/watching.py [--rounds 5] [--steps 12] [--threads 1] [--track tensorboard,wandb,mlflow,trackio]

Each round runs the shipped GRPO driver twice as a process of its own, once with all of it and once with nothing, the
first of them in turn. *All* is what a run does unless it is told otherwise, and more: metrics of the policy, timeline,
waits, memory, traffic, digests of all rows, ledger, health rules, rows of each step, the trackers that are installed,
and ``flowrl show`` on the folder, asked by a client every two seconds as its page asks. *Nothing* takes these out of
the runtime: no stream is written, nothing is measured or noted. Both keep the journal, and take no checkpoint.

A figure is the median of the seconds between commits, without the first two steps of each run; that of all rounds is
the median of their ratios. CPU seconds are those of the run's own process, its trackers among them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SKIP = 2  # steps of a run
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--track", default=",".join(n for n, p in PACKAGES.items() if importlib.util.find_spec(p)))
    parser.add_argument("--without-show", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # all or nothing, in a process of its own
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.parts:
        with tempfile.TemporaryDirectory() as folder:
            said.run, said.out, said.track = "all", Path(folder) / "run", ""
            spent = timed_parts()
            found = run(said)
        for name, seconds in sorted(spent.items(), key=lambda part: -part[1]):
            print(f"{name:18}{1e3 * seconds / said.steps:9.3f} ms of a step")
        whole = sum(spent.values()) / said.steps
        print(
            f"{'all of it':18}{1e3 * whole:9.3f} ms of {1e3 * found['cpu']:.0f} ms: {100 * whole / found['cpu']:.2f} %"
        )
        return
    if said.run:
        print(json.dumps(run(said)))
        return
    print(f"trackers: {said.track or 'none'}; {said.steps} steps, {said.threads} threads", flush=True)
    ratios: dict[str, list[float]] = {"seconds": [], "cpu": []}
    for number in range(said.rounds):
        with tempfile.TemporaryDirectory() as folder:
            order = ("all", "nothing") if number % 2 == 0 else ("nothing", "all")
            found = {kind: measure(said, kind, Path(folder) / kind) for kind in order}
        for what, kept in ratios.items():
            kept.append(found["all"][what] / found["nothing"][what])
        lines = (f"{kind} {found[kind]['seconds']:.4f} s, CPU {found[kind]['cpu']:.4f} s" for kind in found)
        print(f"round {number + 1}: {'; '.join(lines)}; ratio {ratios['seconds'][-1]:.4f}", flush=True)
    for what, kept in ratios.items():
        print(f"{what:8} all by nothing: median {statistics.median(kept):.4f}, from {min(kept):.4f} to {max(kept):.4f}")


def measure(said: argparse.Namespace, kind: str, out: Path) -> dict[str, float]:
    """Run once; the seconds of a step, and of its CPU."""
    words = [f"--run={kind}", f"--out={out}", f"--steps={said.steps}", f"--track={said.track}"]
    threads = {name: str(said.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    cache = str(out.parent / "cache")
    process = subprocess.Popen(
        [sys.executable, __file__, *words], env={**os.environ, **threads, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with follow(out, cache) if kind == "all" and not said.without_show else contextlib.nullcontext():
        printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


class follow(contextlib.AbstractContextManager[None]):
    """``flowrl show`` on a folder, asked as its page asks."""

    def __init__(self, out: Path, cache: str) -> None:
        self.out, self.cache, self.done = out, cache, threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()

    def ask(self) -> None:
        from show_run import Asked

        while not (self.out / "run.json").exists():
            if self.done.wait(0.1):
                return
        command = [sys.executable, "-m", "flowrl", "show", str(self.out), "--no-browser"]
        environment = {**os.environ, "XDG_CACHE_HOME": self.cache, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            asked = Asked(next(line.split()[-1] for line in process.stdout if "http://" in line), process.pid)
            while not self.done.wait(2.0):
                run = asked("runs")["runs"][0]["id"]
                for program in asked("names", run=run)["programs"]:
                    asked("curves", run=run, program=program["program"], name=program["names"][:40])
                asked("lanes", run=run)
                asked("rows", run=run, program="grpo")
        except urllib.error.URLError as error:
            sys.exit(f"flowrl show has not answered: {error}")
        finally:
            process.terminate()
            process.wait()


def run(said: argparse.Namespace) -> dict[str, float]:
    """Run the demo in this process; the median seconds of a step."""
    from flowrl.cli.arguments.script import load_script
    from flowrl.runtime.driver.runner import Runner

    times: list[tuple[float, float]] = []
    real = Runner._commit

    def commit(self: Any, *step: Any) -> None:
        real(self, *step)
        times.append((time.perf_counter(), time.process_time()))

    Runner._commit = commit  # type: ignore[method-assign]
    more: dict[str, Any] = {"track": [name for name in said.track.split(",") if name], "trajectories_every": 1}
    if said.run == "nothing":
        record_nothing()
        more = {"trajectories": 0}
    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    how: dict[str, Any] = {"quiet": True, "save_models": False, "checkpoint_every": 1_000_000, "seed": 0}
    flow.run(out=said.out, steps=said.steps, **how, **more)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times[SKIP - 1 :])]
    return {"seconds": statistics.median(s for s, _ in steps), "cpu": statistics.median(c for _, c in steps)}


def timed_parts() -> dict[str, float]:
    """Have the parts of recording add up the CPU seconds that they take, in their thread."""
    from flowrl.backends import update_rows
    from flowrl.backends.hf import update_passes
    from flowrl.runtime.driver.monitoring.health import Health
    from flowrl.runtime.driver.monitoring.releases import Releases
    from flowrl.runtime.driver.monitoring.step_notes import StepNotes
    from flowrl.runtime.storage.recorder import Recorder

    spent: dict[str, float] = {}

    def time_part(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def timed(*given: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                found = real(*given, **more)
                return list(found) if name == "look" else found
            finally:
                spent[name] = spent.get(name, 0.0) + time.thread_time() - began

        setattr(owner, name, timed)

    for owner, names in (
        (StepNotes, ("note_start", "note_end", "note_draw", "note_publish")),
        (Recorder, ("commit", "note_memory")),
        (Releases, ("find",)),
        (Health, ("look",)),
        (update_rows, ("repeated_grams", "without_signal")),
        (update_passes, ("token_sums",)),
    ):
        for name in names:
            time_part(owner, name)
    return spent


def record_nothing() -> None:
    """Take out of the runtime what measures, notes and records."""
    from flowrl.backends import measures, update_rows
    from flowrl.backends.hf import update_passes
    from flowrl.runtime.driver.monitoring.health import Health
    from flowrl.runtime.driver.monitoring.step_notes import StepNotes
    from flowrl.runtime.driver.monitoring.wait_notes import WaitNotes
    from flowrl.runtime.storage.recorder import Recorder

    def nothing(*given: Any, **more: Any) -> None:
        """Do nothing."""

    for module in (measures, update_rows, update_passes):
        module.trains_policy = lambda loss, batch: False  # type: ignore[assignment]
    for name in ("note_start", "note_end", "note_draw", "note_publish"):
        setattr(StepNotes, name, nothing)
    Recorder.commit = lambda self, program, step, tokenizer: [{"program": program, "step": step.number}]  # type: ignore
    Recorder.note = Recorder.note_memory = nothing  # type: ignore
    Health.look = lambda self, *given: ()  # type: ignore
    WaitNotes.watching = contextlib.nullcontext  # type: ignore


if __name__ == "__main__":
    main()
