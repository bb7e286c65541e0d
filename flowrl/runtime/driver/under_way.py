"""What a program has under way: calls that are not done, commands that threads were handed, and what has failed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from time import perf_counter
from typing import Any

from ...errors import FlowError, RankLost, RunError, cut
from ...schedule.machine import Machine
from ..values.call import Call

MOVE = 1 << 62  # stands for a move of weights among the numbers of calls


class Skipped(Exception):
    """A call whose input failed: not run."""


class LeftOut(Skipped):
    """A call of a step that a replay does not do again, for which the world would have been asked; no failure."""


class UnderWay:
    """What the threads of a program's pools share. ``changed`` is told of all that happens; its lock guards the rest.

    ``calls`` are not done yet: threads take theirs out, so others go through a copy. ``since`` says when what runs was
    begun, by number. ``queued`` commands were handed to threads and are not begun. ``resting`` are the pools whose rows
    stand still. ``failures`` are (number of the call, error).
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: dict[int, Call] = {}
        self.since: dict[int, float] = {}
        self.queued = 0
        self.resting: set[str] = set()
        self.failures: list[tuple[int, BaseException]] = []
        self.closing = False
        self.events = 0  # so far
        self._quiet_since = perf_counter()
        self._driver = threading.current_thread()

    def note_event(self) -> float:
        """Note that something happens; return when. The caller has the lock."""
        self._quiet_since = perf_counter()
        self.events += 1
        return self._quiet_since

    @property
    def quiet(self) -> float:
        """Seconds since the last event."""
        return perf_counter() - self._quiet_since

    def fail(self, number: int, error: BaseException) -> None:
        """Keep a failure for the driver, which raises it; what stops a whole program stops the driver's thread now."""
        self.failures.append((number, error))
        if not isinstance(error, Exception) and threading.current_thread() is self._driver:
            raise error

    def take_first_failure(self) -> BaseException | None:
        """Return the first failure in program order, which counts the others, and forget all of them."""
        failures = ((i, e) for i, e in self.failures if not isinstance(e, Skipped))
        failed = sorted(failures, key=_explains)
        self.failures.clear()
        if not failed:  # what they waited for was told before, and caught by the program
            return None
        first = failed[0][1]
        if len(failed) > 1:
            first.add_note(f"({len(failed) - 1} more calls of this step failed after it)")
        return first

    def runs_own_ops_alone(self) -> bool:
        """Whether something runs, and all of it are moves of weights and ops of flowrl's own."""
        with self.changed:
            calls = [self.calls.get(number) for number in list(self.since)]
            return bool(self.since) and all(call is None or _is_own(call) for call in calls)

    def waits(self, machine: Machine) -> tuple[list[dict[str, Any]], float]:
        """Return what is not done, as :class:`flowrl.runtime.storage.wait_record.WaitingCall`, and for how long nothing
        has happened."""
        with self.changed:
            now = time.time()
            found = [
                {**node._asdict(), "since": self.since.get(node.id), "at": self._line(node.id)}
                for node in machine.unfinished()
            ]
            since = list(self.since.values())
            return found, max([self.quiet, *(now - begun for begun in since)])

    def _line(self, number: int) -> str:
        """The line of a call in the script."""
        call = self.calls.get(number)
        return f"{Path(call.at.file).name}:{call.at.line}" if call is not None and call.at is not None else ""


def _explains(failure: tuple[int, BaseException]) -> tuple[bool, bool, int]:
    """Where a failure stands among those of a step: a loss explains the others, and a publish those that waited for it.

    A loss is told best by the call that met it, as others meet a rank that was ended since.
    """
    number, error = failure
    lost = isinstance(error, RankLost)
    return not lost, number != MOVE and not lost, number


def _is_own(call: Call) -> bool:
    """Whether the op of a call is one of flowrl's, and calls no code of others that nobody counts."""
    return not call.op.external and str(getattr(call.op.fn, "__module__", "")).startswith("flowrl.")


def with_line(error: BaseException, call: Call) -> BaseException:
    """Return the error as the user meets it: with the line of their program. Errors that say where they are stay."""
    if isinstance(error, FlowError):
        if error.at is None:
            error.at = call.at
        return error
    if not isinstance(error, Exception):
        return error
    failed = RunError(cut(f"{call.title} failed: {type(error).__name__}: {error}"), at=call.at)
    failed.__cause__ = error
    return failed
