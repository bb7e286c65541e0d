"""A run in a process of its own, and every way to disturb it: at a point of what a rank does, or at any time."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import faults
from faults import Fault
from kills_driver import REWARDS, ROLLOUT, TRAIN

RANKS = (*TRAIN, *ROLLOUT, *REWARDS)
POOLS = {"train": TRAIN, "rollout": ROLLOUT, "rewards": REWARDS}
SILENT = 10.0  # seconds that a rank has to say that it is there, once the deadline is over
STARTS = 60.0  # seconds that a driver and all ranks have to start and to go on from a checkpoint
HAPPENS = 60.0  # seconds in which a fault happens that was asked for at a point of a step


@dataclass(frozen=True)
class Done:
    """Faults that have happened: ``Done("pair", "ranks 2, 4", took=3.2, limit=20.0, count=2)``, in seconds.

    ``blamed``: the rank that the run said it had lost, where that is another one.
    """

    kind: str
    what: str
    took: float
    limit: float
    count: int = 1
    blamed: int | None = None


class Stuck(Exception):
    """The run makes no progress, or has ended."""


class Disturbed:
    """A run in a process of its own."""

    def __init__(self, out: Path, *, steps: int, deadline: float, mark: str, more: list[str]) -> None:
        self.out, self.steps, self.deadline, self.mark, self.more = out, steps, deadline, mark, more
        self.start()

    def start(self, *more: str) -> None:
        """Start it, or go on with it."""
        words = [str(Path(__file__).with_name("kills_driver.py")), str(self.out)]
        words += ["--steps", str(self.steps), "--deadline", str(self.deadline), *self.more, *more]
        with self.out.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdout=log,
                stderr=log,
                env={"RAY_worker_niceness": "0", **os.environ, "FLOWRL_KILLS": self.mark},  # it is timed
                start_new_session=True,
            )

    def number(self, rank: int) -> int:
        """The rank that is where the plan had one: who comes in the place of one that is gone has a new number."""
        there: dict[str, dict[str, str]] = json.loads((self.out / "ranks.json").read_text())
        planned = next(ranks for ranks in POOLS.values() if rank in ranks)
        pool = next(name for name, ranks in POOLS.items() if rank in ranks)
        return sorted(int(n) for n, where in there.items() if where["pool"] == pool)[planned.index(rank)]

    def pid(self, rank: int) -> int:
        """The process of a rank, as the run says it."""
        return json.loads((self.out / "ranks.json").read_text())[str(self.number(rank))]["pid"]

    def is_whole(self) -> bool:
        """Whether each pool has all ranks of the plan."""
        missing: set[str] = set()
        for event in map(json.loads, _whole_lines(self.out / "events.jsonl")):
            if event["kind"] == "resumed":
                missing.clear()
            elif event["kind"] == "resized":
                for pool in POOLS:
                    if event["text"].startswith(f"pool '{pool}' has all"):
                        missing.discard(pool)
                    elif event["text"].startswith(f"pool '{pool}' "):
                        missing.add(pool)
        return not missing

    def lines(self) -> int:
        """Steps that are recorded; fewer when the run goes back."""
        return len(_whole_lines(self.out / "metrics.jsonl"))

    def step_seconds(self) -> float:
        """What a step takes without a fault: the least of the latest."""
        return min(json.loads(line)["seconds"] for line in _whole_lines(self.out / "metrics.jsonl")[-5:])

    def events(self, since: float, *kinds: str) -> list[str]:
        """What it says that has happened."""
        said = [json.loads(line) for line in _whole_lines(self.out / "events.jsonl")]
        return [e["text"] for e in said if e["time"] > since and e["kind"] in kinds]

    def blamed(self, since: float, ranks: Collection[int]) -> int | None:
        """The rank that it says was lost first, where that is none of these."""
        found = (re.match(r"rank (\d+) of pool", text) for text in self.events(since, "lost"))
        named = next((int(one[1]) for one in found if one), None)  # rows that are lost are told too, and blame nobody
        return named if named not in ranks else None

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Until something is so. Raises Stuck after so many seconds, or when the run has ended."""
        until = time.monotonic() + seconds
        while not done():
            if self.process.poll() is not None:
                raise Stuck(f"the run ended with status {self.process.returncode} before {what}")
            if time.monotonic() > until:
                raise Stuck(f"not in {seconds:.0f} s: {what}")
            time.sleep(0.02)

    def progress(self, since: float, seconds: float, what: str, *, told: bool = True) -> float:
        """Seconds from a fault until the run has recorded a step again; it has ``told`` that it goes on."""
        on = ("renewed", "recovered", "resumed", "resized")
        self.wait(lambda: not told or bool(self.events(since, *on)), seconds, f"it went on after {what}")
        least = self.lines()

        def further() -> bool:
            nonlocal least
            now = self.lines()
            least = min(least, now)
            return now > least

        self.wait(further, seconds, f"a step after {what}")
        return time.time() - since

    def end(self) -> None:
        """Have nothing of it left."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _whole_lines(file: Path) -> list[str]:
    """The lines of a file that is being written."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def at_points_of(run: Disturbed, wanted: list[Fault], limit: float) -> float:
    """Have ranks take faults where they come to them; when the last one was."""
    before = len(faults.struck(run.out))
    for fault in wanted:
        faults.ask(run.out, replace(fault, rank=run.number(fault.rank)))
    names = ", then ".join(fault.name for fault in wanted)
    run.wait(lambda: len(faults.struck(run.out)) >= before + len(wanted), max(HAPPENS, limit), f"{names} came up")
    return faults.struck(run.out)[-1]["time"]


def at_any_time(run: Disturbed, chance: random.Random, ranks: Collection[int], number: int = signal.SIGKILL) -> float:
    """Send a signal to some ranks, whatever they are doing; when that was."""
    time.sleep(chance.uniform(0, run.step_seconds()))
    pids = [run.pid(rank) for rank in ranks]
    at = time.time()
    for i, pid in enumerate(pids):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            if not i:
                raise  # nothing was hit; others may be gone, as the run ends them with the first
    return at


# -- kinds of faults ------------------------------------------------------------------------------------------------

WHEN = ("before", "while", "after")
#: What a publish is made of, and which ranks do it.
PUBLISH = [
    *((rank, "sums", when) for rank in (*TRAIN, *ROLLOUT) for when in WHEN),
    *((rank, point, when) for rank in (*TRAIN, *ROLLOUT) for point in ("move",) for when in WHEN),
    *((rank, "message", when) for rank in (*TRAIN, *ROLLOUT) for when in ("before", "after")),
    *((rank, "weights_written", when) for rank in ROLLOUT for when in WHEN),
]
SAVING = ("capture_state", "write_captured", "files")
CHECKPOINT = [(rank, point, when) for rank in TRAIN for point in SAVING for when in WHEN]
UPDATE = [(rank, point, when) for rank in TRAIN for point in ("actor.update", "team") for when in WHEN]
CALLS = [(rank, point, when) for rank in ROLLOUT for point in ("actor.generate", "ref.logprobs") for when in WHEN]
ANSWERS = [(rank, "answer", "before") for rank in REWARDS] + [(r, "reward.score", w) for r in REWARDS for w in WHEN]
POINTS = {"publish": PUBLISH, "checkpoint": CHECKPOINT, "update": UPDATE, "call": CALLS, "reward": ANSWERS}
KINDS = (*POINTS, "connect", "renew", "judges", "rank", "pair", "all", "stop", "driver", "pause")
#: How often each kind comes in a hundred, and how many faults one of it is, where that is not one.
SHARES = {**dict(zip(KINDS, (25, 10, 10, 9, 10, 5, 5, 2, 8, 6, 2, 3, 4, 1), strict=True)), "gone": 10}
#: A replica that is lost for good, and one that comes in its place later: of runs that wait for none.
GONE = "gone"
#: Those of a run in one process.
OF_DRIVER = ("driver", "pause")
PAUSE = 3.0  # seconds for which a driver is stopped
FAULTS = {"connect": 2, "judges": len(REWARDS), "pair": 2, "all": len(RANKS)}
#: Among which ranks those of a kind are, that come at any time.
AMONG = {"renew": ROLLOUT, "judges": REWARDS}


def limit_of(kind: str, limit: float, deadline: float) -> float:
    """Seconds that a recovery from a kind of fault may take: ``limit``, but for those that are known to take longer."""
    longer = {"stop": limit + deadline + SILENT, "all": 2 * limit, "driver": max(limit, STARTS)}
    return longer.get(kind, limit)


def choose(kind: str, chance: random.Random) -> list[Fault]:
    """The faults at points that one of a kind is made of; none for those that come at any time."""
    if kind in POINTS:
        return [Fault(*chance.choice(POINTS[kind]))]
    if kind == "connect":  # a rank that generates is lost, and another one dies while the new one connects
        first = Fault(chance.choice(ROLLOUT), "actor.generate", "before")
        point = chance.choice((("connect", "before"), ("meet", "after"), ("slots", "after"), ("connect", "after")))
        return [first, Fault(chance.choice([r for r in (*TRAIN, *ROLLOUT) if r != first.rank]), *point)]
    return []


def strike(run: Disturbed, kind: str, at_points: list[Fault], chance: random.Random, limit: float) -> Done:
    """One fault of a kind, or the two of it, and how long the run took to go on."""
    run.wait(run.is_whole, STARTS, "all ranks were there")
    numbers = {rank: run.number(rank) for rank in RANKS} if kind not in OF_DRIVER else {}
    if at_points:
        ranks, what = {f.rank for f in at_points}, ", then ".join(f.name for f in at_points)
        at = at_points_of(run, at_points, limit)
    elif kind == "driver":
        time.sleep(chance.uniform(0, run.step_seconds()))
        at, what, ranks = time.time(), "the driver", set[int]()
        run.process.kill()
        run.process.wait()
        run.start("--resume")
    elif kind == "pause":
        time.sleep(chance.uniform(0, run.step_seconds()))
        at, what, ranks = time.time(), "the driver, for a while", set[int]()
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE)
        run.process.send_signal(signal.SIGCONT)
    elif kind == GONE:
        ranks = {chance.choice((*ROLLOUT, *REWARDS))}
        what = f"rank {min(ranks)}, for good"
        faults.no_room(run.out).touch()
        at = at_any_time(run, chance, ranks)
    else:
        ranks = set(chance.sample(AMONG.get(kind, RANKS), FAULTS.get(kind, 1)))
        what = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
        at = at_any_time(run, chance, ranks, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    took = run.progress(at, 5 * limit, what, told=kind != "pause")
    blamed = run.blamed(at, [numbers.get(rank, rank) for rank in ranks])
    if kind == GONE:
        run.progress(time.time(), 5 * limit, f"{what}, with one rank less", told=False)
        faults.no_room(run.out).unlink()
    return Done(kind, what, took, limit, FAULTS.get(kind, 1), blamed)
