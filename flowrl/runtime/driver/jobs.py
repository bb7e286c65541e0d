"""What the threads of pools are given to do: a command of the machine each, of which it is told when it is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ...batch import Batch
from ...schedule.events import Command, Commit, Event, Finished, GoOn, Publish, Stage, Start, Take
from ..executor import PendingCall, SteppedCall
from ..values.call import Call
from ..values.remote_batch import RemoteBatch
from ..values.step_records import Release
from .exchanged_groups import GroupCall


class Runs(Protocol):
    """Does what jobs are there for: :class:`.command_runner.CommandRunner`."""

    def start(self, job: CommandJob) -> bool: ...
    def finish(self, job: CommandJob) -> bool: ...
    def let_rows_go_on(self, command: GoOn) -> None: ...
    @property
    def tell(self) -> Tells: ...


class Tells(Protocol):
    """Tells the machine of an event, and the pools that are free since then."""

    def __call__(self, event: Event, freed: Sequence[str] = ()) -> None: ...


class CommandJob:
    """A command of the machine in the thread of its pool: see :class:`.pool_threads.Job`. It tells the machine."""

    def __init__(self, runner: Runs, command: Command, thread: str, due: float, after: Release) -> None:
        self.runner, self.command, self.thread = runner, command, thread  # that of its pool
        self.due, self.after = due, after  # when it was let begin, and by what
        self.call: Call | None = None
        self.pending: PendingCall | None = None
        self.rows: Batch | RemoteBatch | None = None  # the first batch of its arguments
        self.started = 0.0
        self.stepped: SteppedCall | None = None  # the same, where it goes on step by step
        self.entered = False  # the machine was told that all its rows are in the engine
        self.waits_for_turn = False  # in a replay: its engine is not yet where it was
        self.groups: deque[GroupCall] | None = None  # that are not over, of a call whose groups may be exchanged

    def start(self) -> bool:
        """Start it; tells the machine at once where nothing is to be waited for."""
        waits = False
        try:
            waits = self.runner.start(self)
        finally:
            if not waits:
                self.runner.tell(end_of(self.command), self.pools)
        return waits

    def finish(self) -> bool:
        """Wait for it, or go on with it by a step of its engine; return whether it is over, and tell the machine."""
        over = True
        try:
            over = self.runner.finish(self)
        finally:
            if over:
                # The thread may hold on to this job until the next one comes.
                self.call = self.pending = self.stepped = self.rows = self.groups = None
                self.runner.tell(end_of(self.command), self.pools)
        return over

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that it takes."""
        return () if isinstance(self.command, (Commit, GoOn, Take)) else self.command.pools


class GoOnJob:
    """Rows that stand still in a pool go on, once its thread comes to it."""

    def __init__(self, runner: Runs, command: GoOn) -> None:
        self.runner, self.command = runner, command

    def start(self) -> bool:
        """Have them go on."""
        self.runner.let_rows_go_on(self.command)
        return False

    def finish(self) -> bool:
        """It is over."""
        return True


def end_of(command: Command) -> Event:
    """Return what the machine is told when a command is done."""
    assert isinstance(command, (Start, Stage, Publish)), command
    return Finished(command.id, command.chunk if isinstance(command, Start) else 0)
