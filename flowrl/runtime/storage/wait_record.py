"""``waits.json``: what a run waited for when it was last written, read back by those who look at its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

NAME = "waits.json"
RESTART = "the restart of what was lost"  # for which ranks are waited for that have no process yet


@dataclass(frozen=True)
class WaitingCall:
    """A call, a stage or a publish that is not done: ``WaitingCall(17, "reward.score", 3, running=True)``.

    ``on`` are the numbers of those that it waits for, ``busy`` those that run in a pool that it needs; ``held``: a
    publish that waits for the next step to be closed. ``since`` is when it began to run, ``at`` its line in the script.
    """

    id: int
    title: str
    step: int
    running: bool = False
    held: bool = False
    pools: tuple[str, ...] = ()
    on: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    version: int | None = None
    since: float | None = None
    at: str = ""

    def __str__(self) -> str:
        return f"{self.title} of step {self.step}" + (f" ({self.at})" if self.at else "")


@dataclass(frozen=True)
class WaitingRank:
    """A rank that has been asked and has not answered, or not all of its call: ``WaitingRank(2, "train", 4711, ...)``.

    ``began`` tells its process from others of that number; empty where the driver could not see it. ``deadline``: the
    seconds that the call may take, None for no limit.
    """

    rank: int
    pool: str
    pid: int
    node: str
    began: str
    what: str
    since: float
    deadline: float | None = None


@dataclass(frozen=True)
class WaitRecord:
    """All of it: when it was written, for how long nothing had happened then, and where the driver was.

    ``opening``: the worker that is being opened, or its copy that generates; empty once all are open.
    """

    time: float
    quiet: float
    driver: str = ""
    program: str = ""
    step: int | None = None
    opening: str = ""
    calls: tuple[WaitingCall, ...] = ()
    ranks: tuple[WaitingRank, ...] = ()


def read_waits(folder: Path) -> WaitRecord | None:
    """What a run waited for; None where it did not wait long, or nothing can be read."""
    try:
        said = json.loads((folder / NAME).read_text())
        calls = tuple(WaitingCall(**{n: _plain(v) for n, v in call.items()}) for call in said.pop("calls", ()))
        ranks = tuple(WaitingRank(**rank) for rank in said.pop("ranks", ()))
        known: Mapping[str, Any] = {f.name: said[f.name] for f in fields(WaitRecord) if f.name in said}
        return WaitRecord(**known, calls=calls, ranks=ranks)
    except (OSError, ValueError, TypeError):
        return None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
