"""What the calls of a trace give: the fields of a batch after them, and which rows these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import FieldError, did_you_mean, near
from ...marks import UNMARKED, Marks
from ..stand_ins.scalars import ScalarValue
from ..stand_ins.values import BatchValue, MetricsValue
from .call_errors import written_twice
from .row_operations import passed_on
from .trace_records import Rows, TBatch, TCall, TField, TMetrics, TNumber, rows_each

if TYPE_CHECKING:
    from .tracer import Tracer


def result_of(
    tracer: Tracer,
    call: TCall,
    batch: TBatch | None,
    into: Mapping[str, str],
    arguments: Mapping[str, Any],
    marks: Mapping[str, Marks],
) -> Any:
    """Return the value that a call gives, with the fields that it adds and their ``marks``."""
    op, signature, at = call.op, call.signature, call.at
    if op.returns == "metrics":
        return MetricsValue(tracer, TMetrics(call.index, call.title))
    if op.returns == "scalar":
        return ScalarValue(tracer, TNumber(frozenset({call.index}), call.title, f"c{call.index}"))
    if op.returns == "none":
        return None
    for word in sorted(set(into) - set(signature.adds)):
        what, fix = f"{call.title} adds no '{word}' that into= could rename.", did_you_mean(word, signature.adds)
        tracer.wrong(FieldError(what, at=at, have=signature.adds, fix=fix))
        if meant := near(word, signature.adds):
            into = {meant: into[word], **into}
    inherited = dict(batch.fields) if batch and op.inherits else {}
    rows, rows_call = _rows_after(call, batch, arguments)
    if op.rows in ("expand", "filter"):  # rows were made anew: what is read later comes from here
        inherited = passed_on(inherited, call.index, rows)
    added = {into.get(n, n): (t, marks.get(n, UNMARKED)) for n, t in signature.adds.items()}
    if twice := [n for n in added if n in inherited]:
        tracer.wrong(written_twice(call.title, twice, at))
    for name, (type_, own) in added.items():
        inherited[name] = TField(type_, call.index, name, rows, (call.index, name), made=name, marks=own)
    return BatchValue(tracer, TBatch(inherited, rows, rows_call))


def _rows_after(call: TCall, batch: TBatch | None, arguments: Mapping[str, Any]) -> tuple[Rows, int | None]:
    if batch is None or call.op.rows == "regroup":
        return ("regroup", call.index), call.index
    if call.op.rows in ("same", "apart"):
        return batch.rows, batch.rows_call
    n = arguments.get("n")
    if call.op.rows == "expand" and isinstance(n, int):
        return ("expand", batch.rows, n), call.index
    if call.op.rows == "expand" and isinstance(n, ScalarValue):  # equal numbers have one key
        return ("expand", batch.rows, n.ref.key), call.index
    factor: Any = (call.index,) if call.op.rows == "expand" else call.index  # no number, as nobody knows how many
    return (call.op.rows, batch.rows, factor), call.index


def sampled(batch: TBatch, calls: Sequence[TCall]) -> tuple[int | None, str]:
    """Return how many rows each prompt has at most, equal ones once, and who sampled them; None if not known."""
    if batch.rows_call is None or "preferred" in batch.fields:  # a source of pairs has two rows of each prompt
        return None, ""
    before = calls[: batch.rows_call + 1]
    sampled = next((call for call in reversed(before) if call.op.rows == "expand"), None)
    if sampled is None:
        return None, ""
    each, by = rows_each(batch.rows), f"{sampled.title} (line {sampled.at.line})"
    greedy = sampled.op.cost == "generate" and sampled.arguments.get("greedy") is True
    if greedy and each == sampled.arguments.get("n"):  # of one prompt
        return 1, f"{by}, and leave out greedy=True: its rows are equal"
    return each, by
