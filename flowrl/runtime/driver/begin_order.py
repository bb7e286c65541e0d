"""In which order the pool that samples begins with calls and publishes, and how far its engine was by then: noted as a
run goes, and kept to in a replay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...schedule.events import PUBLISH, STAGE, Begun, Command, Commit, Publish, Stage, Start, Take
from ...schedule.scheme import Scheme
from ..executor import Executor

_MOMENT = 0.001  # seconds from one look at an engine that is not there yet to the next


@dataclass(slots=True)
class _Noted:
    """What was handed to the pool's thread; what is known once it has begun."""

    number: int
    part: int
    after: Mapping[int, int] | None = None
    ranks: tuple[int, ...] = ()


class BeginOrder:
    """Counts the steps of the engines between two starts in the pool that samples. With ``setup.begun`` of an earlier
    run, a start waits until its engines have made as many, and they wait for the start."""

    def __init__(self, scheme: Scheme, executor: Executor) -> None:
        setup = scheme.setup
        self.pool, self._executor = setup.sampling_pool, executor
        self._worker = next(iter(setup.followers), "")
        self._noted: deque[_Noted] = deque()
        self._taken: dict[int, tuple[tuple[int, int], ...]] = {}
        self._known: dict[tuple[int, int], Begun] = {begun.key: begun for begun in setup.begun}
        self._following = {a.key: b for a, b in zip(setup.begun, setup.begun[1:], strict=False)}
        self._groups = bool(setup.taken)
        self._base: dict[int, int] = {}  # by rank: steps of its engine as the last start began
        self._ends: Mapping[int, int] | None = None  # by rank: steps that its engine may make until the next start

    def hand_out(self, command: Command) -> None:
        """Note a command of the machine, in its order."""
        if isinstance(command, Take):
            self._taken[command.id] = command.groups
        elif self.pool is not None and not isinstance(command, Commit) and self.pool in command.pools:
            self._noted.append(_Noted(*_key(command)))

    def may_begin(self, command: Start | Stage | Publish) -> bool:
        """Whether the engines are where they were in the earlier run; has them wait there."""
        known = self._known.get(_key(command)) if self.pool in command.pools else None
        if known is None:
            return True
        steps = self._executor.engine_steps(self._worker)
        wanted = {rank: self._base.get(rank, 0) + count for rank, count in known.after.items()}
        if all(not runs or made >= wanted.get(rank, 0) for rank, (made, runs) in steps.items()):
            return True
        time.sleep(_MOMENT)
        return False

    def choose_ranks(self, command: Start) -> None:
        """Have the groups of a call go to the ranks that had them in the earlier run."""
        known = self._known.get(_key(command))
        if known is not None and known.ranks:
            self._executor.choose_ranks(self._worker, known.ranks)

    def begin(self, command: Start | Stage | Publish, ranks: tuple[int, ...] = ()) -> None:
        """Note that a command has begun: how many steps the engines have made since the one before."""
        if self.pool not in command.pools:
            return
        steps = {rank: made for rank, (made, _) in self._executor.engine_steps(self._worker).items()}
        noted = next(each for each in self._noted if (each.number, each.part) == _key(command))
        after = {rank: made - self._base.get(rank, 0) for rank, made in steps.items()}
        noted.after, noted.ranks = {rank: count for rank, count in after.items() if count > 0}, ranks
        self._base = steps
        if self._known:
            following = self._following.get(_key(command))
            ends = None if following is None else {r: n + following.after.get(r, 0) for r, n in steps.items()}
            self._hold(ends)

    def stands_still(self) -> bool:
        """Whether every engine that has rows waits for a start: it has made as many steps as in the earlier run."""
        if self._ends is None:
            return False
        run = {rank: made for rank, (made, runs) in self._executor.engine_steps(self._worker).items() if runs}
        return bool(run) and all(made >= self._ends.get(rank, 0) for rank, made in run.items())

    def go_on(self) -> None:
        """Have engines go on until the next start, though it comes later than in the earlier run."""
        self._hold(None)

    def _hold(self, ends: Mapping[int, int] | None) -> None:
        self._ends = ends
        self._executor.hold_engines(self._worker, ends)

    @property
    def is_kept(self) -> bool:
        """Whether the order is that of an earlier run."""
        return bool(self._known or self._groups)

    def free(self) -> None:
        """Keep the order of the earlier run no longer: nothing waits for what may never be issued."""
        self._known, self._following, self._groups = {}, {}, False
        self._hold(None)

    def take_notes(self) -> tuple[list[Any], dict[int, Any]]:
        """Return what has begun since the last time, as JSON has it, and the groups that calls have got; once."""
        begun: list[Any] = []
        while self._noted and self._noted[0].after is not None:
            each = self._noted.popleft()
            begun.append([each.number, each.part, each.after, each.ranks])
        taken, self._taken = self._taken, {}
        return begun, dict(taken)


def _key(command: Start | Stage | Publish) -> tuple[int, int]:
    if isinstance(command, Start):
        return command.id, command.chunk
    return (PUBLISH if isinstance(command, Publish) else STAGE), command.version
