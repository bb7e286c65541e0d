"""What the record of a step keeps of what its calls give: its rows, their rewards, and a few rows by their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...batch import Batch
from ...graph.ops.update_metrics import Metrics
from ..executor import Executor
from ..storage.metric_lines import BESIDE_REFERENCE
from ..storage.recorder import first_groups
from ..values.call import Call
from ..values.remote_batch import RemoteBatch
from ..values.step_records import StepLog
from .monitoring.step_notes import tells_no_reference

REFERENCE_GROUPS = 16  # prompt groups of a step whose KL to the reference is looked at, where no loss has it


class StepRows:
    """``StepRows(log, executor, sampled)``: ``sampled`` says how many prompt groups of a step are written down."""

    def __init__(self, log: StepLog, executor: Executor, sampled: Callable[[int], int]) -> None:
        self._log, self._executor, self._sampled = log, executor, sampled

    def note(self, call: Call, result: Any) -> None:
        """Keep what a call gave, as far as the record of its step needs it."""
        step = self._log.of(call)
        if "rewards" in call.into:
            step.parts[call.into["rewards"]] = None
        if call.op.updates and step.rows is not None:
            told = [n for n in ("rewards", "source", *step.parts) if n in step.rows.fields]
            if "rewards" in told and len(told) > 1 and step.recorded is None:
                step.sourced = self._executor.get(step.rows.select(*told))
            again = step.recorded is not None and step.beside_reference is not None  # another update with these rows
            if not again and tells_no_reference(call, result) and set(BESIDE_REFERENCE) <= set(step.rows.fields):
                some = first_groups(step.rows.select(*BESIDE_REFERENCE), REFERENCE_GROUPS)
                step.beside_reference = self._executor.get(some)
        if isinstance(result, (Batch, RemoteBatch)) and "response_ids" in result.fields and call.index > step.last:
            step.rows, step.last, step.recorded = result, call.index, None
            if step.marked is None and "failed" in result.fields:
                step.marked = result
        count = self._sampled(step.number) if call.op.updates and step.recorded is None else 0
        if count and isinstance(step.rows, RemoteBatch):
            # Once this is published, those that lie on a rank that is lost cannot be made again.
            step.recorded = self._executor.get(first_groups(step.rows, count))
            if step.marked is not None:
                step.marked = self._executor.get(first_groups(step.marked, count))
        if isinstance(result, Metrics) and result.rows_seen:
            step.seen[call.index] = result.rows_seen
            result.rows_seen = ()
