"""Which of the calls behind a batch an op has to wait for: those that made what it reads, not all that came after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..batch import Batch
from ..errors import FlowError
from ..graph.op import Op, Signature, written_twice
from ..graph.values import BatchValue
from .call import Call


def shortest(call: Call, names: frozenset[str]) -> Call:
    """The earliest call whose batch has all of ``names`` and the same rows.

    After ``batch = reward.score(batch)`` a reference that reads tokens need not wait for the rewards.
    """
    while call.base is not None and not names & call.adds:
        call = call.base
    return call


def declared(op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Signature, Any] | None:
    """What a call reads and adds, and its main batch; None where only the run can tell."""
    if op.owner == "batch":
        return None
    try:
        arguments = op.bind(worker, args, {k: v for k, v in kwargs.items() if k != "into"})
        main = arguments.get(op.batch_parameter)
        if not isinstance(main, BatchValue) or main.ref.fields is None:
            return None
        return op.signature(worker.arguments if worker else {}, arguments, main.ref.fields), main
    except (FlowError, TypeError):  # said with its line when the call is run
        return None


def fields_after(op: Op, args: tuple[Any, ...], added: frozenset[str] | None) -> frozenset[str] | None:
    """The fields of a call's batch, as far as they are known before it is run."""
    first = args[0].ref.fields if args and isinstance(args[0], BatchValue) and isinstance(args[0].ref, Call) else None
    if op.owner != "batch":
        return None if first is None or added is None else first | added if op.inherits else added
    if first is None:
        return None
    if op.name == "filter":
        return first
    if op.name == "join" and isinstance(args[1], BatchValue):
        other = args[1].ref.fields
        return None if other is None else first | other
    return None


def _merge(batch: Batch, made: Batch, names: tuple[str, ...]) -> Batch:
    """The whole batch with the fields that an op has added to an earlier one of the same rows."""
    twice = [n for n in names if n in batch.fields]
    if twice:
        raise written_twice("an op", twice, None)
    if made.keys != batch.keys:
        made = made.take_keys(batch.keys)
    return batch.with_columns({n: made[n] for n in names})


MERGE = Op(name="merge", owner="data", fn=_merge, reads=None, adds="", returns="raw", pieces=True)
