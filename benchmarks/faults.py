"""Faults on purpose: a rank kills or stops its own process at a named point of what it does.

A driver calls :func:`arm` where its workers open, on the rank. Whoever disturbs the run calls :func:`ask`; the rank
takes the fault when it comes to that point, writes down when, and sends itself the signal. :func:`struck` reads that.
All of it lies in files beside the run folder, so that it can be asked for from any process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partialmethod, wraps
from pathlib import Path
from typing import Any

#: Where each point is: what a rank is asked for, and inside of that what the wire does.
POINTS = {
    "open": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "open"),
    "run": (
        "flowrl.runtime.distributed.rank_process.rank",
        "Rank",
        "run",
    ),  # its point is the title of the call, such as actor.update; so is that of rows that leave one by one
    "begin": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "begin"),
    "advance": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "advance"),
    "sums": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "sums"),
    "connect": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "connect"),
    "move": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "move"),
    "weights_written": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "weights_written"),
    "capture_state": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "capture_state"),
    "write_captured": ("flowrl.runtime.distributed.rank_process.rank", "Rank", "write_captured"),
    "meet": ("flowrl.runtime.transfer.wire", "Wire", "_meet"),
    "slots": ("flowrl.runtime.transfer.wire", "Wire", "_who_reads"),
    "message": ("flowrl.runtime.transfer.wire", "Sending", "wait"),
    "files": ("flowrl.runtime.storage.checkpoints.snapshot", "", "write_shards"),
    "team": ("flowrl.backends.team", "Ranks", "sum"),
}
WHILE = 0.01  # seconds after which a point has begun and mostly not ended


@dataclass(frozen=True)
class Fault:
    """``Fault(2, "move", "while")``: rank 2 dies in its next move. ``skip``: so many of that point are let through."""

    rank: int
    point: str
    when: str = "before"  # or while, or after
    signal: int = signal.SIGKILL
    skip: int = 0

    @property
    def name(self) -> str:
        """As it is said: ``rank 2, while move``."""
        return f"rank {self.rank}, {self.when} {self.point}"


def beside(out: Path | str) -> Path:
    """The folder of the faults of a run."""
    folder = Path(f"{out}.faults")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def ask(out: Path | str, fault: Fault) -> None:
    """Have a rank of a run take a fault when it next comes to the point."""
    file = beside(out) / f"{fault.rank}.{fault.point}.{fault.when}"
    file.with_suffix(".part").write_text(json.dumps(asdict(fault)))
    file.with_suffix(".part").replace(file)


def withdraw(out: Path | str, fault: Fault) -> bool:
    """Take a fault back that has not happened; False where it has."""
    try:
        (beside(out) / f"{fault.rank}.{fault.point}.{fault.when}").unlink()
    except FileNotFoundError:
        return False
    return True


def struck(out: Path | str) -> list[dict[str, Any]]:
    """The faults that have happened, with their time."""
    file = beside(out) / "struck.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def no_room(out: Path | str) -> Path:
    """The file that, while it is there, says that the cluster has no room for ranks that were lost."""
    return beside(out) / "no_room"


def hold_back(out: Path | str) -> None:
    """Have lost ranks not come back to the driver of this process while :func:`no_room` is there."""
    from flowrl.runtime.distributed.ray.start_ranks import RayRanks

    arrived = RayRanks.arrived
    RayRanks.arrived = lambda self: {} if no_room(out).exists() else arrived(self)  # type: ignore[method-assign]


def append(out: Path | str, name: str, line: Any) -> None:
    """Add a line to a file beside the run in one write, whoever else writes to it."""
    file = os.open(beside(out) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


# -- on the rank ----------------------------------------------------------------------------------------------------


class _Here:
    """The rank of this process. It is kept with what is watched: a module that travels by value has many copies."""

    def __init__(self) -> None:
        self.out, self.rank = "", -1

    def come_to(self, point: str, when: str) -> None:
        """Take the fault that is asked for here, if there is one."""
        if not self.out:
            return
        file = beside(self.out) / f"{self.rank}.{point}.{when}"
        try:
            fault = Fault(**json.loads(file.read_text()))
            if fault.skip:
                file.write_text(json.dumps(asdict(Fault(fault.rank, point, when, fault.signal, fault.skip - 1))))
                return
            file.unlink()
        except FileNotFoundError:
            return
        append(self.out, "struck.jsonl", {"time": time.time(), "pid": os.getpid(), **asdict(fault)})
        os.kill(os.getpid(), fault.signal)

    def watched(self, method: Callable[..., Any], point: str) -> Callable[..., Any]:
        """The method, which takes faults before it, a moment after it has begun, and after it."""

        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            name = point
            if type(args[0]).__name__ == "Rank" if args else False:
                self.out, self.rank = args[0].config.folder, args[0].number
                name = _name_of(point, args)
            self.come_to(name, "before")
            timer = None
            if self.out and (beside(self.out) / f"{self.rank}.{name}.while").exists():
                timer = threading.Timer(WHILE, self.come_to, (name, "while"))
                timer.start()
            made = method(*args, **kwargs)
            if timer is not None:  # it was quicker
                timer.cancel()
                self.come_to(name, "while")
            self.come_to(name, "after")
            return made

        return called


def _name_of(point: str, args: tuple[Any, ...]) -> str:
    """What a point of a rank is called: calls have their titles."""
    if point in ("run", "begin"):
        return args[1 if point == "run" else 2].title
    return f"{args[1][0]}.generate" if point == "advance" else point


def arm(*, shared: bool = True) -> None:
    """Watch the points of this process, once. Without ``shared`` its weights go by gloo, as from host to host."""
    from flowrl.runtime.distributed.rank_process.rank import Rank
    from flowrl.runtime.transfer.wire import Wire

    if hasattr(Rank, "faults"):
        return
    here = Rank.faults = _Here()  # type: ignore[attr-defined]
    if not shared:
        Wire.__init__ = partialmethod(Wire.__init__, shared=False)  # type: ignore[assignment]
    for point, (module, owner, name) in POINTS.items():
        where: Any = importlib.import_module(module)
        where = getattr(where, owner) if owner else where
        setattr(where, name, here.watched(getattr(where, name), point))


def here() -> Any:
    """The rank of this process, where it is armed: :class:`_Here`."""
    from flowrl.runtime.distributed.rank_process.rank import Rank

    return getattr(Rank, "faults", None)
