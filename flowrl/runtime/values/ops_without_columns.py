"""Operations on batches whose columns lie on ranks that need no column: other names, other rows of the same columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...graph.ops.op import Op
from ...graph.tracing.call_errors import written_twice
from .remote_batch import RemoteBatch, RemoteColumn, RemoteValue

UNKNOWN = object()  # the answer where columns are needed after all


def on_driver(op: Op, arguments: Mapping[str, Any]) -> Any:
    """The result of an operation on keys and names alone, or UNKNOWN."""
    if op.owner not in ("batch", "data"):
        return UNKNOWN
    args, _ = op.parameters.passed(arguments)
    values = [a for a in args if isinstance(a, RemoteValue)]
    if not values and not any(isinstance(a, Mapping) for a in args):
        return op.fn(*args)  # numbers
    known = _KNOWN.get(op.name)
    return UNKNOWN if known is None else known(*args)


def _merge(batch: RemoteBatch, made: RemoteBatch, names: tuple[str, ...]) -> RemoteBatch:
    twice = [n for n in names if n in batch]
    if twice:
        raise written_twice("an op", twice, None)
    return batch.with_sources({n: made.columns[n] for n in names})


def _drop(batch: RemoteBatch, names: Sequence[str]) -> RemoteBatch:
    for name in names:
        batch[name]
    return batch.select(*(n for n in batch.fields if n not in names))


def _rename(batch: RemoteBatch, names: Mapping[str, str]) -> Any:
    for name in names:
        batch[name]
    new = [names.get(n, n) for n in batch.fields]
    if len(set(new)) < len(new):
        return UNKNOWN  # the error is a batch's
    return RemoteBatch(batch.keys, dict(zip(new, batch.columns.values(), strict=True)))


def _with_columns(batch: RemoteBatch, columns: Mapping[str, Any]) -> Any:
    if not all(isinstance(c, RemoteColumn) and c.keys == batch.keys for c in columns.values()):
        return UNKNOWN
    return batch.with_sources({n: c.source for n, c in columns.items()})


def _join(batch: RemoteBatch, other: RemoteBatch) -> Any:
    if set(batch.keys) != set(other.keys):
        return UNKNOWN
    for name in batch.fields:
        if name in other and batch.columns[name] != other.columns[name]:
            return UNKNOWN
    return batch.with_sources({n: s for n, s in other.columns.items() if n not in batch})


def _concat(batch: RemoteBatch, *others: RemoteBatch) -> Any:
    alike = all(set(b.fields) == set(batch.fields) for b in others)
    if alike and not RemoteBatch.can_concat([batch, *others]):
        return UNKNOWN
    return RemoteBatch.concat([batch, *others])


def _select(batch: RemoteBatch, names: Sequence[str]) -> RemoteBatch:
    return batch.select(*names)


_KNOWN: dict[str, Callable[..., Any]] = {
    "merge": _merge,
    "select": _select,
    "drop": _drop,
    "rename": _rename,
    "with_columns": _with_columns,
    "join": _join,
    "concat": _concat,
    "count": len,
}
