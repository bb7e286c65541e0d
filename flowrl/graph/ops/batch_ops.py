"""Arithmetic and row operations on batches and fields, as ops of the worker ``batch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...batch import Batch
from ..stand_ins.values import PYTHON, BatchValue, FieldValue
from .field_types import FieldType
from .op import Op

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "invert"})
ELEMENTWISE = frozenset({*PYTHON, *(f"r{n}" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))})
REDUCTIONS = frozenset({"mean", "sum", "min", "max", "std"})
BY_ROW = {"row_sum": "f32", "row_mean": "f32", "lengths_column": "i64"}
GROUPED = frozenset({"group_mean", "group_std"})
#: What changes neither rows nor contents: no node of the graph, only other names for what is there.
STRUCTURAL = frozenset({"join", "select", "drop", "rename", "with_columns"})


def _elementwise(name: str) -> Callable[..., Any]:
    if name in PYTHON:
        return PYTHON[name]
    plain = PYTHON[name[1:]]

    def reflected(a: Any, b: Any) -> Any:
        return plain(b, a)

    return reflected


def _method(name: str) -> Callable[..., Any]:
    def call(column: Any) -> Any:
        return getattr(column, name)()

    return call


def _grouped(how: str) -> Callable[..., Any]:
    def call(batch: Batch, name: str) -> Any:
        return batch.group_reduce(batch[name], how)

    return call


def _concat(batch: Batch, *others: Batch) -> Batch:
    return batch.concat(*others)


_ON_BATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "join": lambda batch, other: batch | other,
    "filter": lambda batch, mask: batch.filter(mask),
    "select": lambda batch, names: batch.select(*names),
    "drop": lambda batch, names: batch.drop(*names),
    "rename": lambda batch, names: batch.rename(**names),
    "with_columns": lambda batch, columns: batch.with_columns(columns),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(name) for name in ELEMENTWISE},
    **{name: _method(name) for name in (*REDUCTIONS, *BY_ROW)},
    "group_mean": _grouped("mean"),
    "group_std": _grouped("std"),
    "count": len,
    "concat": _concat,
    **_ON_BATCHES,
}

_ROWS = {"filter": "filter", "concat": "regroup"}

OPS: dict[str, Op] = {
    name: Op(
        name=name.removeprefix("r") if name in ELEMENTWISE and name not in PYTHON else name,
        owner="batch",
        fn=fn,
        reads=None,
        adds="",
        rows=_ROWS.get(name, "same"),
        returns="raw",
        cost="local",
        pieces=name not in (*REDUCTIONS, "count", "concat"),
    )
    for name, fn in _FUNCTIONS.items()
}


def result_kind(op: Op, arguments: Mapping[str, Any]) -> str:
    """Return what a call of one of these ops gives: ``batch``, ``field`` or ``scalar``."""
    if op.name in REDUCTIONS or op.name == "count":
        return "scalar"
    given = arguments.values()
    if op.name in BY_ROW or op.name in GROUPED or any(isinstance(a, FieldValue) for a in given):
        return "batch" if op.name == "filter" else "field"
    return "batch" if isinstance(next(iter(given)), BatchValue) else "scalar"


def result_type(name: str, types: list[FieldType]) -> FieldType:
    """The type of an elementwise result: ragged if an operand is; bool for comparisons; else the widest dtype."""
    dims = next((t.dims for t in types if t.dims), ())
    if name in COMPARISONS:
        return FieldType("bool", dims)
    if name == "truediv" or not types:
        return FieldType("f64" if any(t.dtype == "f64" for t in types) else "f32", dims)
    order = ("bool", "i32", "i64", "bf16", "f32", "f64", "any")
    return FieldType(max((t.dtype for t in types), key=order.index), dims)
