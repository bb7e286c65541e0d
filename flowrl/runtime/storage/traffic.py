"""What the calls of a step read and made, in bytes by field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...batch import Batch, Column
from ...graph.ops.op import Op
from ...graph.stand_ins.values import FieldValue
from ..values.call import Call, Part
from ..values.remote_batch import FINISHED, RemoteBatch, RemoteColumn, bytes_of, finished_of

PARTS = 20  # of the rows, between the quantiles of their lengths
_NUMBER = 8  # bytes of a number that a call gives


def bytes_read(call: Call, worker: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each field that a call is given to read: ``{"tokens": 3152, "advantages": 1576}``.

    ``arguments`` are those of ``call`` with values in the place of references. An op that does not declare what it
    reads, such as a filter, is given all fields.
    """
    found: dict[str, int] = {}
    for name, column in (*_declared(call, worker, arguments), *_fields(call, arguments)):
        found[name] = found.get(name, 0) + _bytes(column)
    return found


def bytes_made(result: Any, given: Batch | RemoteBatch | None, op: Op) -> dict[str, int]:
    """Bytes of each field that a call has made: those added to its rows, or all of them where the rows are new ones.

    A field or a number on its own is called ``value``.
    """
    if isinstance(result, (Column, RemoteColumn)):
        return {"value": _bytes(result)}
    if isinstance(result, (int, float)):
        return {"value": _NUMBER}
    if not isinstance(result, (Batch, RemoteBatch)):
        return {}
    handed_on = frozenset(given.fields) if given is not None and op.rows == "same" else frozenset[str]()
    return {name: _bytes(result[name]) for name in result.fields if name not in handed_on}


def row_tokens(rows: Any, name: str) -> list[int]:
    """Tokens of a field in each row; empty where there is none, or where that is not known."""
    if not isinstance(rows, (Batch, RemoteBatch)) or name not in rows.fields:
        return []
    if isinstance(rows, RemoteBatch):
        return rows.columns[name].sizes(rows.keys) or []
    return [] if rows[name].lengths is None else rows[name].lengths.tolist()


def prompt_tokens(rows: Any) -> list[int]:
    """Tokens before the response of each row, which an agent may have written; empty as of :func:`row_tokens`."""
    whole, responses = row_tokens(rows, "tokens"), row_tokens(rows, "response_ids")
    if not whole or len(whole) != len(responses):
        return row_tokens(rows, "prompt_ids")
    return [tokens - response for tokens, response in zip(whole, responses, strict=True)]


def rows_cut_off(rows: Any) -> int | None:
    """How many rows are not finished; None where the rows do not say."""
    if isinstance(rows, RemoteBatch):
        finished = rows.columns[FINISHED].sizes(rows.keys) if FINISHED in rows.fields else None
    else:
        finished = finished_of(rows).get(FINISHED) if isinstance(rows, Batch) else None
    return None if finished is None else len(finished) - sum(finished)


def spread(lengths: Sequence[int]) -> list[int]:
    """Quantiles of lengths from the shortest to the longest, twenty equal parts of the rows apart; empty without rows.

    >>> spread(range(41))[:4]
    [0, 2, 4, 6]
    """
    ordered = sorted(lengths)
    return [ordered[round(part * (len(ordered) - 1) / PARTS)] for part in range(PARTS + 1)] if ordered else []


def length_quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """The middle of some lengths, what one in twenty is beyond, and the longest; empty without rows.

    >>> length_quantiles(range(101))
    {'p50': 50, 'p95': 95, 'max': 100}
    """
    ordered = sorted(lengths)
    parts = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: ordered[round(part * (len(ordered) - 1))] for name, part in parts.items()} if ordered else {}


def _declared(call: Call, worker: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Column | RemoteColumn]]:
    """The fields that an op declares to read, of each batch that it is given."""
    op = call.op
    if op.owner == "batch":
        args, _ = op.parameters.passed(arguments)
        for batch in (a for a in args if isinstance(a, (Batch, RemoteBatch))):
            named = [a for a in args if isinstance(a, str)]  # a group's mean is of the field that is named
            yield from ((name, batch[name]) for name in batch.fields if name in named or not named)
        return
    reads = call.reads if call.reads is not None else _reads(op, worker, arguments)
    for parameter, fields in reads.items():
        value = arguments.get(parameter)
        if isinstance(value, (Batch, RemoteBatch)):
            yield from ((name, value[name]) for name in fields if name in value)


def _reads(op: Op, worker: Any, arguments: Mapping[str, Any]) -> Mapping[str, Collection[str]]:
    """What an op reads of each batch, where only the rows themselves say which fields they have."""
    main = arguments.get(op.batch_parameter)
    if not isinstance(main, (Batch, RemoteBatch)):
        return {}
    return op.signature(_init(worker), arguments, frozenset(main.fields)).reads


def _fields(call: Call, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Column | RemoteColumn]]:
    """Single fields that a call is given, under the names that they have in their batches."""
    fields = [v for v in call.values if isinstance(v, FieldValue)]
    columns = [a for a in arguments.values() if isinstance(a, (Column, RemoteColumn))]
    if len(fields) == len(columns):
        for value, column in zip(fields, columns, strict=True):
            yield (value.ref.name if isinstance(value.ref, Part) else "value"), column


def _init(worker: Any) -> Mapping[str, Any]:
    """What a worker was made with, here or on ranks."""
    blueprint = getattr(worker, "blueprint", None)
    return blueprint.arguments if blueprint is not None else getattr(worker, "init_arguments", {})


def _bytes(column: Column | RemoteColumn) -> int:
    return column.source.bytes(len(column)) if isinstance(column, RemoteColumn) else bytes_of(column)
