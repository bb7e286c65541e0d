"""Calls of user code as a run sees them: told of while they take long, and named where a process died in them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...batch import Batch, CallInfo
from ...errors import NotFinite, RankLost, RunError
from ...graph.ops.apply import IN_A_CHILD
from ...graph.ops.op import Op
from ...workers.user_code.printed_output import bounded_output
from ...workers.user_code.rows_in_progress import FORKED, NAME, Notes, Row, at_work, bury, code_of, lines_of, told

FIRST = 60.0  # seconds after which a row is told of, and again after twice as many
LOOK = 5.0  # seconds between two looks at the notes


def user_call(
    op: Op, worker: Any, args: Iterable[Any], info: CallInfo, notes: Notes, warn: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Run a call of an op inside: an exit in it is its failure, a child that it has forked and comes back is ended,
    and what it prints without end is cut off.

    One that touches the world is noted, unless its worker notes its rows itself, and what it does to the working
    directory is undone.
    """
    if op.external:
        return _noted(op, worker, args, info, notes, warn)
    return _contained(lambda: Row(step=info.step, op=info.op, code=code_of(op.fn)), info, notes, warn)


@contextmanager
def _noted(
    op: Op, worker: Any, args: Iterable[Any], info: CallInfo, notes: Notes, warn: Callable[[str], None]
) -> Iterator[None]:
    number = 0
    batch = next((a for a in args if isinstance(a, Batch)), None)
    row = Row(info.program, info.step, info.op, code=code_of(op.fn))
    if not getattr(worker, "notes_rows", False) and batch is not None and len(batch):
        row = replace(row, key=batch.keys[0], rows=len(batch))
        number = notes.begin(row)
    before = _folder()
    try:
        with _contained(lambda: row, info, notes, warn):
            yield
    finally:
        notes.end(number)
        if before is not None and (now := _folder()) != before:
            with suppress(OSError):
                os.chdir(before)
            warn(f"{info.op} of step {info.step} changed the working directory to {now}; it is {before} again")


@contextmanager
def _contained(row: Callable[[], Row], info: CallInfo, notes: Notes, warn: Callable[[str], None]) -> Iterator[None]:
    """A child that the op has forked off is ended as soon as it comes back, before it writes anywhere."""
    token = IN_A_CHILD.set(lambda: notes.end_fork(row()))
    try:
        with bounded_output(row, warn):
            yield
    except SystemExit as error:
        raise RunError(
            f"{info.op} of step {info.step} failed: SystemExit: {error.code}",
            fix="Raise an exception that says what is wrong: an exit would end the whole run.",
        ) from error
    except NotFinite as error:
        if info.op and info.op not in error.what.partition(":")[0]:  # an engine does not know for whom it works
            error.what = f"{info.op} of step {info.step}: {error.what}"
        raise
    finally:
        IN_A_CHILD.reset(token)


@contextmanager
def same_folder() -> Iterator[None]:
    """The working directory is what it was after the block."""
    before = _folder()
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.chdir(before)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def died_before(out: Path) -> str:
    """Where the process of a run that is gone on with has died, as far as it was in user code; empty where not.

    Its ranks died because it did.
    """
    status = ""
    with suppress(OSError, ValueError):
        status = json.loads((out / "run.json").read_text()).get("status", "")
    rows = bury(out, NAME, driver=True) if status == "running" else []
    for file in out.glob(f"{NAME}*.jsonl"):
        if not file.name.startswith(f"{NAME}_"):
            file.unlink(missing_ok=True)
    return f"the process before died at {told(rows)}" if rows else ""


def name_rows(lost: RankLost, out: Path) -> None:
    """Have the loss of ranks say at which rows their user code was."""
    for rank in lost.ranks:
        if rows := bury(out, f"{NAME}.*.{rank}"):
            lost.what = f"{lost.what.rstrip('.')}; it was at {told(rows)}."
            lost.fix = f"Mend {rows[0].code}, if the process has died of it."


class Watch:
    """Tells of rows that user code takes long for, on whichever process: after a minute, two, four and so on."""

    def __init__(self, out: Path, warn: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._out, self._warn, self._clock = out, warn, clock
        self._next: dict[tuple[Any, ...], float] = {}
        self._forks = 0
        self._end = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look every few seconds inside the block."""
        thread = threading.Thread(target=self._look_on, daemon=True, name="flowrl-watch")
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()
            self.look()

    def look(self) -> None:
        """Tell of what is new."""
        now, there = self._clock(), at_work(self._out)
        self._next = {key: due for key, due in self._next.items() if key in {(r.id, r.since) for r in there}}
        for row in there:
            key = (row.id, row.since)
            if now - row.since >= (due := self._next.get(key, FIRST)):
                self._warn(f"{row} has taken {due:g} s so far")
                while now - row.since >= due:
                    due *= 2
                self._next[key] = due
        forks = lines_of(self._out / FORKED)
        for line in forks[self._forks :]:
            self._warn(str(line.get("text", "")))
        self._forks = len(forks)

    def _look_on(self) -> None:
        while not self._end.wait(LOOK):
            with suppress(OSError):
                self.look()
