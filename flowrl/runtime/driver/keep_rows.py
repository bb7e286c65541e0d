"""Rows of calls that a run keeps in its folder: those with numbers that are not finite, and all that are sampled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...batch import Batch
from ...errors import FlowError
from ..executor import Executor
from ..storage.not_finite_rows import save_rows
from ..storage.sampled_rows import RecordedRows, SampledRows
from ..values.call import Call

Take = Callable[[Call, int, str, Any], Any]  # what was sampled, and what the program goes on with: Hooks.take_sampled


def keep_not_finite(out: Path, executor: Executor, tell: Callable[[str, str], None], call: Call, rows: Any) -> None:
    """Write down the rows of a call whose numbers are not finite, as far as they can be had, and tell where."""
    with suppress(FlowError):
        rows = None if rows is None else executor.get(rows)
        if isinstance(rows, Batch):
            path = save_rows(out, step=call.step, op=call.title, rows=rows)
            text = f"{call.title} of step {call.step} met numbers that are not finite: its rows are in {path}"
            tell("not finite", text)


def keep_sampled(out: Path, executor: Executor, program: int) -> Take:
    """Return what keeps the rows that a program samples, so that a replay can give them again."""
    kept = SampledRows(out)

    def keep(call: Call, part: int, node: str, rows: Any) -> Any:
        kept.write(program, call.index, part, executor.get(rows))
        return rows

    return keep


def take_recorded(out: Path, executor: Executor, program: int, replayed: Path) -> Take:
    """Return what gives a program the rows that the run ``replayed`` has kept, in place of those that it samples."""
    recorded = RecordedRows(replayed, out)

    def take(call: Call, part: int, node: str, rows: Any) -> Any:
        sampled = executor.get(rows)
        return executor.put(recorded.take(program, node, call.step, call.index, part, sampled))

    return take
