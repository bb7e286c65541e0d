"""Arithmetic of columns, element by element: which ones fit, and what a number or a fixed column is spread over."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import FieldError, RowsError
from ..marks import logprob_kind, unlike
from .tensors import dtype_names

if TYPE_CHECKING:
    from torch import Tensor

    from .column import Column


def _named(name: str) -> Callable[..., Any]:
    """An operator of Python's whose refusal is a FieldError that names both sides."""
    plain = getattr(operator, name)

    def fn(*sides: Any) -> Any:
        try:
            return plain(*sides)
        except (TypeError, NotImplementedError, RuntimeError) as error:
            raise FieldError(
                f"'{name.rstrip('_')}' does not take {' and '.join(map(_said, sides))}: {error}.",
                fix="Use columns of numbers, or of one kind. ~, & and | are for bool[], such as (batch.rewards > 0).",
            ) from error

    return fn


def _said(side: Any) -> str:
    """A side of an operator in a message."""
    dtype = dtype_names().get(getattr(side, "dtype", None))
    return f"a column of {dtype}" if dtype else f"{side!r:.40}"


def binary(name: str, *, reflected: bool = False) -> Callable[[Column, Any], Column]:
    """The method of a column for one of Python's operators: ``binary("add")``."""
    fn = _named(name)
    counts = name in ("add", "sub", "mul", "floordiv", "mod", "pow")  # where Python takes True as 1
    if reflected:
        return lambda column, other: _combined(column, other, lambda a, b: fn(b, a), counts=counts)
    if name in ("add", "sub"):
        what = "a subtraction" if name == "sub" else "an addition"
        return lambda column, other: _combined(_like(column, other, what), other, fn, counts=counts)
    if name == "mul":
        return lambda column, other: _masked(_combined(column, other, fn, counts=counts), column, other)
    return lambda column, other: _combined(column, other, fn, counts=counts)


def unary(name: str) -> Callable[[Column], Column]:
    """The method of a column for an operator of one operand: ``unary("neg")``."""
    fn = _named(name)

    def method(column: Column) -> Column:
        if isinstance(column.values, list):
            return column.of([fn(x) for x in column.values])
        made = column.with_values(fn(_counted(column.values) if name != "invert" else column.values))
        return made.marked(logprob_kind(column.marks)) if name == "neg" else made

    return method


def _like(column: Column, other: Any, what: str) -> Column:
    """Return this column. Raises FieldError where the two are log-probabilities of different kinds."""
    if column.marks and isinstance(other, type(column)):
        error = unlike(what, {"the left": column.marks, "the right": other.marks})
        if error is not None:
            raise error
    return column


def _masked(product: Column, column: Column, other: Any) -> Column:
    """Return a product with its kind where it is log-probabilities times a mask."""
    if not isinstance(other, type(column)) or "bool" not in (column.dtype, other.dtype):
        return product
    return product.marked(logprob_kind(other.marks if column.dtype == "bool" else column.marks))


def _combined(column: Column, other: Any, fn: Callable[[Any, Any], Any], *, counts: bool) -> Column:
    if not isinstance(other, type(column)) and getattr(other, "shape", ()) != ():
        other = column.of(other)
    shape = column
    if isinstance(other, type(column)):
        if len(other) != len(column):
            raise RowsError(f"{column.type} has {len(column)} rows, {other.type} has {len(other)}.")
        if isinstance(column.values, list) or isinstance(other.values, list):
            return column.of([fn(a, b) for a, b in zip(column, other, strict=True)])
        a, b, shape = _aligned(column, other)
    elif isinstance(column.values, list):
        return column.of([fn(x, other) for x in column.values])
    elif isinstance(other, (int, float)) or hasattr(other, "shape"):
        a, b = column.values, other
    else:
        raise FieldError(f"{column.type} cannot be combined with {other!r}.", fix="Use a number or another column.")
    return shape.with_values(fn(_counted(a), _counted(b)) if counts else fn(a, b))


def _counted(x: Any) -> Any:
    """Bools as numbers, for arithmetic as Python does it."""
    import torch

    return x.long() if isinstance(x, torch.Tensor) and x.dtype == torch.bool else x


def same_lengths(a: Column, b: Column) -> bool:
    """Whether the rows of two ragged columns have the same lengths."""
    return a.lengths is b.lengths or bool((a.lengths == b.lengths).all())


def _aligned(a: Column, b: Column) -> tuple[Tensor, Tensor, Column]:
    """The values of two columns element by element, and the one whose lengths the result has."""
    if a.lengths is not None and b.lengths is not None and not same_lengths(a, b):
        row = int((a.lengths != b.lengths).nonzero()[0])
        raise RowsError(f"{a.type} and {b.type} differ in row {row}: {a.lengths[row]} and {b.lengths[row]} elements.")
    shape = a if a.lengths is not None else b
    x, y = _spread(a, shape), _spread(b, shape)
    deep = max(x.dim(), y.dim())
    return x.reshape(*x.shape, *[1] * (deep - x.dim())), y.reshape(*y.shape, *[1] * (deep - y.dim())), shape


def _spread(column: Column, shape: Column) -> Tensor:
    """One value per element of ``shape``."""
    values = column.values
    if column.lengths is not None or shape.lengths is None:
        return values
    return values.repeat_interleave(shape.lengths.to(values.device), dim=0, output_size=len(shape.values))
