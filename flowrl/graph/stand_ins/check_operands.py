"""What operators and row operations of a program are given and will not take when they run, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ...errors import FieldError, FlowError, ProgramError
from ..ops.check_arguments import described
from ..ops.field_types import FieldType
from .scalars import ScalarValue
from .values import BatchValue, FieldValue, MetricsValue

_LOGIC = ("and", "or", "invert")
_FLOATS = ("f32", "f64", "bf16")
_EQUAL = ("eq", "ne")
_OF_TEXTS = ("mul", "mod", *_EQUAL)  # of a text and a number, Python has these


def wrong_operand(name: str, args: Sequence[Any], text: str) -> FlowError | None:
    """The error of an operator on fields and numbers: ``wrong_operand("add", (rewards, "x"), "rewards + 'x'")``."""
    for arg in args:
        if isinstance(arg, BatchValue):
            return FieldError(f"{_short(text)}: a batch is no operand.", fix="Name the field: batch.rewards.")
        if isinstance(arg, MetricsValue):
            return FieldError(f"{_short(text)}: metrics are no operand.", fix="Name one of them: metrics.loss.")
    types: list[FieldType] = [arg.ref.type for arg in args if isinstance(arg, FieldValue)]
    plain = [arg for arg in args if not isinstance(arg, (FieldValue, ScalarValue))]
    if not types:
        return _on_numbers(name, plain, text)
    if any(type_.dtype == "any" for type_ in types):
        return None
    for other in plain:
        if not isinstance(other, (int, float)) and not hasattr(other, "shape"):
            return FieldError(
                f"{_short(text)}: a field {types[0]} cannot be combined with {described(other)}.",
                fix="Use a number or another field.",
            )
    floats = [str(t) for t in types if t.dtype in _FLOATS] + [repr(p) for p in plain if isinstance(p, float)]
    if name in _LOGIC and floats:
        return FieldError(
            f"{_short(text)}: ~, & and | are for bool[], and one side is {floats[0]}.",
            fix="Compare first, in parentheses: (batch.rewards > 0) & batch.finished.",
        )
    if name == "lengths_column" and not types[0].dims:
        return FieldError(
            f"{_short(text)}: {types[0]} has one value for each row, and no lengths.",
            fix="Ask a field such as batch.tokens, i32[*token].",
        )
    return None


def _on_numbers(name: str, plain: Sequence[Any], text: str) -> FlowError | None:
    for other in plain:
        without = other is None or isinstance(other, (dict, set)) or (isinstance(other, str) and name not in _OF_TEXTS)
        if without and name not in _EQUAL:
            return ProgramError(
                f"{_short(text)}: a number cannot be combined with {described(other)}.",
                fix="Write it into a text with an f-string." if isinstance(other, str) else "Use another number.",
            )
    return None


def wrong_names(name: str, given: Any) -> FlowError | None:
    """The error of a row operation whose names of fields are none: ``wrong_names("select", (5,))``."""
    if name == "with_columns" and not isinstance(given, Mapping):
        return ProgramError(
            f"with_columns takes a dict of fields by name, and was given a {type(given).__name__}.",
            fix='Write batch.with_columns({"shaped": batch.rewards - 0.5}).',
        )
    names: list[Any] = list(cast("Mapping[Any, Any]", given)) if isinstance(given, Mapping) else list(given)
    if name == "rename":
        names += cast("Mapping[Any, Any]", given).values()
    for one in names:
        if not isinstance(one, str):
            return ProgramError(
                f"{name} takes names of fields, and was given {described(one)}.",
                fix=f"Write them as texts: {_FORMS[name]}.",
            )
    return None


_FORMS = {
    "select": 'batch.select("tokens")',
    "drop": 'batch.drop("tokens")',
    "rename": 'batch.rename(rewards="costs")',
    "with_columns": '{"shaped": batch.rewards}',
    "group_mean": 'batch.group_mean("rewards")',
    "group_std": 'batch.group_std("rewards")',
}


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
