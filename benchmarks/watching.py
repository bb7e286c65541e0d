"""What it costs to watch a run: the demo with everything recorded and followed beside the same run with nothing.

    python benchmarks/watching.py --parts     # CPU of a step that goes into each part of it, in this process
    python benchmarks/watching.py [--rounds 2] [--blocks 12] [--threads 1] [--track tensorboard,wandb,mlflow,trackio]

Each round runs the shipped GRPO driver in two processes, one with all of it and one with nothing. They take turns: each
runs four steps and stops, as a whole, until it is its turn again, so that a machine whose speed changes from minute to
minute changes both. *All* is what a run does unless it is told otherwise, and more: metrics of the policy, timeline,
waits, memory, traffic, digests of all rows, ledger, health rules, rows of each step, the trackers that are installed,
and ``flowrl show`` on the folder, asked by a client every two seconds for all views of its page. *Nothing* takes these
out of the runtime: no stream is written, nothing is measured or noted. Both keep the journal, and take no checkpoint.

The ratio is that of four steps with all of it and the four steps beside them with nothing; the first turn of each is
left out. CPU seconds are those of the run's own process, its trackers among them; with *page* those of ``flowrl show``
during its turns count too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = 4  # steps of a turn
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12, help="turns of each run that count")
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
        steps = BLOCK * (said.blocks + 1)
        cpu = statistics.mean(found["cpu"]) / BLOCK
        for name, seconds in sorted(spent.items(), key=lambda part: -part[1]):
            print(f"{name:18}{1e3 * seconds / steps:9.3f} ms of a step")
        whole = sum(spent.values()) / steps
        print(f"{'all of it':18}{1e3 * whole:9.3f} ms of {1e3 * cpu:.0f} ms: {100 * whole / cpu:.2f} %")
        return
    if said.run:
        print(json.dumps(run(said)))
        return
    print(f"trackers: {said.track or 'none'}; {said.blocks} turns of {BLOCK} steps, {said.threads} threads", flush=True)
    ratios: dict[str, list[float]] = {"seconds": [], "cpu": []}
    for number in range(said.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = in_turn(said, Path(folder), ("all", "nothing") if number % 2 == 0 else ("nothing", "all"))
        for what in ("seconds", "cpu"):
            ratios[what] += [a / b for a, b in zip(found["all"][what], found["nothing"][what], strict=True)]
        if served := found["all"].get("page"):
            both = [a + b for a, b in zip(found["all"]["cpu"], served, strict=True)]
            ratios.setdefault("cpu+page", []).extend(a / b for a, b in zip(both, found["nothing"]["cpu"], strict=True))
        mean = {kind: statistics.mean(turns["seconds"]) / BLOCK for kind, turns in found.items()}
        print(f"round {number + 1}: a step takes {mean['all']:.4f} s with all, {mean['nothing']:.4f} s with nothing")
    for what, kept in ratios.items():
        low, middle, high = statistics.quantiles(kept, n=4)
        print(f"{what:8} all by nothing: median {middle:.4f}, middle half from {low:.4f} to {high:.4f}")


def in_turn(said: argparse.Namespace, folder: Path, order: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """Run each kind, a block at a time; the seconds of each block, and of its CPU."""
    cache = str(folder / "cache")
    threads = {name: str(said.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    runs: dict[str, subprocess.Popen[str]] = {}
    for kind in order:
        words = [f"--run={kind}", f"--out={folder / kind}", f"--blocks={said.blocks}", f"--track={said.track}"]
        runs[kind] = subprocess.Popen(
            [sys.executable, __file__, *words], env={**os.environ, **threads, "XDG_CACHE_HOME": cache},
            stdout=subprocess.PIPE, stderr=(folder / f"{kind}.errors").open("w"), text=True,
        )  # fmt: skip
        wait_for_turn(runs[kind])
    served: list[float] = []
    with follow(folder / "all", cache) if not said.without_show else contextlib.nullcontext() as page:
        for _ in range(said.blocks):
            for kind in order:
                before = page.cpu() if page is not None else 0.0
                if page is not None:
                    page.turn.set() if kind == "all" else page.turn.clear()
                runs[kind].send_signal(signal.SIGCONT)
                wait_for_turn(runs[kind])
                if page is not None and kind == "all":
                    served.append(page.cpu() - before)
    found: dict[str, dict[str, list[float]]] = {}
    for kind, process in runs.items():
        process.send_signal(signal.SIGCONT)
        printed, _ = process.communicate()
        if process.returncode != 0:
            sys.exit((folder / f"{kind}.errors").read_text())
        found[kind] = json.loads(printed.splitlines()[-1])
    return found | ({"all": {**found["all"], "page": served}} if served else {})


def wait_for_turn(process: subprocess.Popen[str]) -> None:
    """Wait until the process has stopped itself; a process that has ended instead is the caller's to read."""
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if process.poll() is None:
        os.waitpid(process.pid, os.WUNTRACED)


class follow(contextlib.AbstractContextManager[None]):
    """``flowrl show`` on a folder, asked as its page asks."""

    def __init__(self, out: Path, cache: str) -> None:
        self.out, self.cache, self.done = out, cache, threading.Event()
        self.turn = threading.Event()  # it asks while the run with all of it is the one that runs
        self.thread = threading.Thread(target=self.ask)
        self.asked: Any = None  # the server, once it is there

    def cpu(self) -> float:
        """Seconds of CPU that the server has used so far."""
        return 0.0 if self.asked is None else self.asked.cpu()

    def __enter__(self) -> follow:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.turn.set()
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
            address = next(line.split()[-1] for line in process.stdout if "http://" in line)
            asked = self.asked = Asked(address, process.pid)
            while not self.done.wait(2.0):
                self.turn.wait()
                run = asked("runs")["runs"][0]["id"]
                for program in asked("names", run=run)["programs"]:
                    asked("curves", run=run, program=program["program"], name=program["names"][:40])
                asked("lanes", run=run)
                asked("rows", run=run, program="grpo")
                for view in ("graph", "ledger", "prompts"):
                    asked(view, run=run, program="grpo")
                for view in ("about", "events", "forecast"):
                    asked(view, run=run)
        except urllib.error.URLError as error:
            sys.exit(f"flowrl show has not answered: {error}")
        finally:
            process.terminate()
            process.wait()


def run(said: argparse.Namespace) -> dict[str, list[float]]:
    """Run the demo in this process, and stop it after each block; the seconds of each."""
    from flowrl.cli.arguments.script import load_script
    from flowrl.runtime.driver.runner import Runner

    found: dict[str, list[float]] = {"seconds": [], "cpu": []}
    real, began, count = Runner._commit, (0.0, 0.0), 0

    def commit(self: Any, *step: Any) -> None:
        nonlocal began, count
        real(self, *step)
        count += 1
        if count % BLOCK == 0:
            if count > BLOCK:
                for kept, now, then in zip(
                    found.values(), (time.perf_counter(), time.process_time()), began, strict=True
                ):
                    kept.append(now - then)
            if not said.parts:
                os.kill(os.getpid(), signal.SIGSTOP)
            began = time.perf_counter(), time.process_time()

    Runner._commit = commit  # type: ignore[method-assign]
    more: dict[str, Any] = {"track": [name for name in said.track.split(",") if name], "trajectories_every": 1}
    if said.run == "nothing":
        record_nothing()
        more = {"trajectories": 0}
    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    how: dict[str, Any] = {"quiet": True, "save_models": False, "checkpoint_every": 1_000_000, "seed": 0}
    flow.run(out=said.out, steps=BLOCK * (said.blocks + 1), **how, **more)
    return found


def timed_parts() -> dict[str, float]:
    """Have the parts of recording add up the CPU seconds that they take, in their thread."""
    from flowrl.backends import update_rows
    from flowrl.backends.hf import update_passes
    from flowrl.backends.seen_rows import SeenRows
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
        (SeenRows, ("add", "to_json")),
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
