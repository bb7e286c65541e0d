"""Which of the calls behind a batch an op has to wait for: those that made what it reads, not all that came after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...batch import Batch
from ...errors import FlowError
from ...graph.ops.op import Op
from ...graph.ops.signature import Signature
from ...graph.stand_ins.values import BatchValue
from ...graph.tracing.call_errors import written_twice
from ..values.call import Call


def shortest(call: Call, names: frozenset[str]) -> Call:
    """Return the earliest call whose batch has all of ``names`` and the same rows.

    After ``batch = reward.score(batch)`` a reference that reads tokens need not wait for the rewards.
    """
    while call.base is not None and not names & call.adds:
        call = call.base
    return call


def read_signature(op: Op, worker: Any, arguments: Mapping[str, Any]) -> tuple[Signature, Any] | None:
    """Return what a call reads and adds, and its main batch; None where only the run can tell."""
    main = arguments.get(op.batch_parameter)
    if op.owner == "batch" or not isinstance(main, BatchValue) or main.ref.fields is None:
        return None
    try:
        return op.signature(worker.arguments if worker else {}, arguments, main.ref.fields), main
    except (FlowError, TypeError):  # said with its line when the call is run
        return None


def fields_after(op: Op, given: Sequence[Any], added: frozenset[str] | None) -> frozenset[str] | None:
    """Return the fields of a call's batch, as far as they are known before it is run; ``given`` are its arguments."""
    fields = _fields(given[0]) if given else None
    if op.owner != "batch":
        return None if fields is None or added is None else fields | added if op.inherits else added
    if fields is None:
        return None
    if op.name == "filter":
        return fields
    other = _fields(given[1]) if op.name == "join" else None
    return None if other is None else fields | other


def _fields(value: Any) -> frozenset[str] | None:
    return value.ref.fields if isinstance(value, BatchValue) and isinstance(value.ref, Call) else None


def _merge(batch: Batch, made: Batch, names: tuple[str, ...]) -> Batch:
    """The whole batch with the fields that an op has added to an earlier one of the same rows."""
    twice = [n for n in names if n in batch.fields]
    if twice:
        raise written_twice("an op", twice, None)
    if made.keys != batch.keys:
        made = made.take_keys(batch.keys)
    return batch.with_columns({n: made[n] for n in names})


MERGE = Op(name="merge", owner="data", fn=_merge, reads=None, adds="", returns="raw", pieces=True)
