"""Arithmetic on fields and numbers, filters, joins and concatenation, in a trace: their types, rows and mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ...batch import already_there
from ...errors import At, FieldError, FlowError, ProgramError, RowsError
from ...marks import UNMARKED, Marks, logprob_kind, unlike
from ..ops.batch_ops import BY_ROW, COMPARISONS, ELEMENTWISE, GROUPED, OPS, REDUCTIONS, STRUCTURAL, result_type
from ..ops.check_arguments import described
from ..ops.field_types import FieldType
from ..ops.op import Op
from ..ops.signature import Signature
from ..script.site import caller
from ..stand_ins.arithmetic_as_written import SYMBOLS, method, written
from ..stand_ins.check_operands import wrong_names, wrong_operand
from ..stand_ins.scalars import ScalarValue
from ..stand_ins.symbols import Symbol
from ..stand_ins.values import BatchValue, FieldValue, MetricsValue, Value
from .trace_records import LONGEST, Rows, TBatch, TCall, TField, TNumber, Use, together

if TYPE_CHECKING:
    from .tracer import Tracer


class RowOps:
    """The ops of the worker ``batch``, for one path of a trace."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._kept: dict[tuple[Rows, tuple[Any, ...]], int] = {}  # by rows and mask, the call that filtered first

    def call(self, op: Op, args: tuple[Any, ...]) -> Any:
        at = caller()
        if op.name in STRUCTURAL:
            return self._structural(op.name, args, at)
        first = args[0]
        if isinstance(first, BatchValue):
            return self._on_batch(op, first.ref, args[1:], at)
        if (error := wrong_operand(op.name, args, self._text(op, args))) is not None:
            self._wrong(error, at)
        fields = [a.ref for a in args if isinstance(a, FieldValue)]
        if not fields:
            return self._on_numbers(op, args, at)
        self._same_rows(op.name, fields, at)
        if op.name in ("add", "sub"):
            what = "a subtraction" if op.name == "sub" else "an addition"
            names = [f.name or f.text for f in fields]
            names = names if len({*names, ""}) > len(names) else ["the left", "the right"]
            if error := unlike(what, {n: f.marks for n, f in zip(names, fields, strict=False)}):
                self._wrong(error, at)
        uses = [u for a in args if isinstance(a, Value) for u in self.tracer.reads.uses(a)]
        signature = Signature({"batch": {f.name or "value": f.type for f in fields}}, {})
        name, text = op.name, self._text(op, args)
        call = self.tracer.record(op, "batch", at, signature, uses, text=text)
        if name in REDUCTIONS:
            return self._number(call, f"{fields[0].name}.{name}" if fields[0].name else name)
        type_ = FieldType(BY_ROW[name]) if name in BY_ROW else result_type(name, [f.type for f in fields])
        marks = _kept_marks(name, fields)
        return FieldValue(self.tracer, TField(type_, call.index, "", fields[0].rows, text=text, marks=marks))

    def _wrong(self, error: FlowError, at: At) -> None:
        error.at = at
        self.tracer.wrong(error)

    def _number(self, call: TCall, label: str, *, whole: bool = False) -> ScalarValue:
        """The number that a call gives."""
        return ScalarValue(self.tracer, TNumber(frozenset({call.index}), call.text, f"c{call.index}", label, whole))

    def _same_rows_as(self, batch: TBatch, fields: Mapping[str, TField]) -> BatchValue:
        """A batch of the same rows with these fields."""
        return BatchValue(self.tracer, TBatch(fields, batch.rows, batch.rows_call))

    def _text(self, op: Op, args: Sequence[Any]) -> str:
        """Return how a call is written: ``(rewards - costs).mean()``."""
        parts = [_operand(arg) for arg in args]
        if op.name in REDUCTIONS or op.name in BY_ROW:
            return method(parts[0], op.name)
        return written(op.name, parts[::-1] if self._reflected(op) else parts)

    def _on_numbers(self, op: Op, args: tuple[Any, ...], at: At) -> Any:
        """Arithmetic on numbers: a node where one of them is not read yet, a symbol otherwise."""
        numbers = [a.ref for a in args if isinstance(a, ScalarValue)]
        keys = [a.ref.key if isinstance(a, ScalarValue) else repr(a) for a in args]
        text, key = self._text(op, args), f"{op.name}({', '.join(keys[::-1] if self._reflected(op) else keys)})"
        whole = op.name != "truediv" and all(_is_whole(a) for a in args)
        number = together(numbers, text, key, whole or op.name in COMPARISONS)
        if all(isinstance(a, Symbol) or not isinstance(a, Value) for a in args):
            return self.tracer.symbol(replace(number, step=_later(op.name, args)))
        uses = [u for a in args if isinstance(a, Value) for u in self.tracer.reads.uses(a)]
        call = self.tracer.record(op, "batch", at, Signature({}, {}), uses, text=text)
        return ScalarValue(self.tracer, TNumber(frozenset({call.index}), text, key, whole=number.whole))

    @staticmethod
    def _reflected(op: Op) -> bool:
        return op.name in ELEMENTWISE and OPS.get("r" + op.name) is op

    def _on_batch(self, op: Op, batch: TBatch, rest: tuple[Any, ...], at: At) -> Any:
        if op.name == "count":
            call = self.tracer.record(op, "batch", at, Signature({}, {}), _rows_of(batch), text="len(batch)")
            self.tracer.counted[call.index] = batch.rows
            return self._number(call, "count", whole=True)
        if op.name in GROUPED:
            return self._grouped(op, batch, rest, at)
        if op.name == "filter":
            return self._filter(op, batch, rest[0], at)
        for other in rest:
            if not isinstance(other, BatchValue):
                what = f"concat takes batches, and was given {described(other)}."
                self._wrong(ProgramError(what, fix="Give it another batch with the same fields."), at)
        return self._concat(op, [batch, *(b.ref for b in rest if isinstance(b, BatchValue))], at)

    def _grouped(self, op: Op, batch: TBatch, names: tuple[Any, ...], at: At) -> FieldValue:
        if (error := wrong_names(op.name, names)) is not None:
            self._wrong(error, at)
            return FieldValue(self.tracer, TField(FieldType("f32"), None, "", batch.rows))
        name, text = names[0], f"{op.name}({names[0]})"
        value = self.tracer.field(BatchValue(self.tracer, batch), name)
        if value.ref.type.dims:
            what = f"{op.name} takes one number per row, and '{name}' is {value.ref.type}."
            fix = f"Give a field that has it: batch.with_columns({{'whole': batch.{name}.row_mean()}})."
            self._wrong(FieldError(what, fix=fix), at)
        signature = Signature({"batch": {name: value.ref.type}}, {})
        call = self.tracer.record(op, "batch", at, signature, self.tracer.reads.uses(value), text=text)
        return FieldValue(self.tracer, TField(FieldType("f32"), call.index, "", batch.rows, text=text))

    def _filter(self, op: Op, batch: TBatch, mask: Any, at: At) -> Any:
        if not isinstance(mask, FieldValue):
            fix = "Write batch.filter(batch.rewards > 0)."
            self._wrong(ProgramError("filter takes a bool field of the batch.", fix=fix), at)
            return BatchValue(self.tracer, batch)
        if not FieldType("bool").accepts(mask.ref.type):
            what = f"filter takes one bool per row, and was given {mask.ref.type}."
            self._wrong(FieldError(what, fix="Compare a number per row: batch.filter(batch.rewards > 0)."), at)
        if mask.ref.rows != batch.rows:
            self._wrong(self._different_rows("filter", batch.rows, mask.ref.rows), at)
        signature = Signature({"batch": {mask.ref.name or "value": mask.ref.type}}, {}, "filter")
        text = f"filter({_operand(mask)})"
        call = self.tracer.record(op, "batch", at, signature, self.tracer.reads.uses(mask), text=text)
        first = self._kept.setdefault((batch.rows, mask.ref.origin or (mask.ref.call,)), call.index)
        rows: Rows = ("filter", batch.rows, first)
        return BatchValue(self.tracer, TBatch(passed_on(batch.fields, call.index, rows), rows, call.index))

    def _concat(self, op: Op, batches: list[TBatch], at: At) -> Any:
        names = set(batches[0].fields)
        for other in batches[1:]:
            if set(other.fields) != names:
                self._wrong(_other_fields(names, set(other.fields)), at)
        for number, batch in enumerate(batches):
            if any(_share_keys(batch.rows, before.rows) for before in batches[:number]):
                what = (
                    f"concat puts rows with other keys below each other; two of these are "
                    f"{self._rows_text(batch.rows)}, whose keys are the same."
                )
                fix = "Sample them together, with n= of all; or join fields of the same rows with a | b."
                self._wrong(RowsError(what, fix=fix), at)
        everywhere = {n: f for b in reversed(batches) for n, f in b.fields.items()}  # what one lacks is told of once
        uses = [use for batch in batches for use in _rows_of(batch)]
        call = self.tracer.record(op, "batch", at, Signature({}, {}, "regroup"), uses)
        rows: Rows = ("concat", *(b.rows for b in batches))
        fields = {
            n: TField(
                f.type,
                call.index,
                n,
                rows,
                (call.index, n),
                tuple(replace(b.fields[n], name=n) for b in batches if n in b.fields),
                made=n,
                marks=f.marks.union(*(b.fields[n].marks for b in batches if n in b.fields)),
            )
            for n, f in everywhere.items()
        }
        return BatchValue(self.tracer, TBatch(fields, rows, call.index))

    def _structural(self, name: str, args: tuple[Any, ...], at: At) -> Any:
        batch: TBatch = args[0].ref
        if name == "join":
            return self._join(batch, args[1], at)
        if (error := wrong_names(name, args[1])) is not None:
            self._wrong(error, at)
            return BatchValue(self.tracer, batch)
        if name == "with_columns":
            return self._with_columns(batch, args[1], at)
        named = list(args[1])
        for missing in (n for n in named if n not in batch.fields):
            self.tracer.field(args[0], missing)  # reports it
        if name == "select":
            fields = {n: f for n, f in batch.fields.items() if n in named}
        elif name == "drop":
            fields = {n: f for n, f in batch.fields.items() if n not in named}
        else:
            fields = {}
            for n, f in batch.fields.items():
                new = args[1].get(n, n)
                if new in fields or (new != n and new in batch.fields and new not in args[1]):
                    self._wrong(already_there("rename", new), at)
                fields[new] = f
        return self._same_rows_as(batch, fields)

    def _with_columns(self, batch: TBatch, columns: Any, at: At) -> Any:
        fields = dict(batch.fields)
        for name, column in cast("Mapping[str, Any]", columns).items():
            if not isinstance(column, FieldValue):
                what = f"with_columns: '{name}' takes a field, and was given {described(column)}."
                self._wrong(ProgramError(what), at)
                continue
            if name in fields:
                self._wrong(already_there("with_columns", name), at)
            field: TField = column.ref
            if field.rows != batch.rows:
                self._wrong(self._different_rows("with_columns", batch.rows, field.rows), at)
            fields[name] = replace(field, name=name, rows=batch.rows, origin=field.origin or (field.call, name))
        return self._same_rows_as(batch, fields)

    def _join(self, batch: TBatch, other: Any, at: At) -> Any:
        if not isinstance(other, BatchValue):
            self._wrong(ProgramError(f"a | b joins two batches; the right one is {type(other).__name__}."), at)
            return BatchValue(self.tracer, batch)
        right: TBatch = other.ref
        if right.rows != batch.rows:
            self._wrong(self._different_rows("a | b", batch.rows, right.rows), at)
            return self._same_rows_as(batch, {**right.fields, **batch.fields})
        fields = dict(batch.fields)
        for name, field in right.fields.items():
            if name in fields and fields[name].origin != field.origin:
                what = f"a | b: '{name}' is written twice, by {' and '.join(map(self.maker, (fields[name], field)))}."
                fix = f"Rename one: into={{'{name}': 'other_{name}'}} where it is added, "
                self._wrong(FieldError(what, fix=f"{fix}or .rename({name}='other_{name}')."), at)
            fields.setdefault(name, field)
        return self._same_rows_as(batch, fields)

    def maker(self, field: TField) -> str:
        """Return the title of the call that made a field."""
        return "the data" if field.call is None else self.tracer.trail.calls[field.call].title

    def _same_rows(self, name: str, fields: Sequence[TField], at: At) -> None:
        for other in fields[1:]:
            if other.rows and fields[0].rows and other.rows != fields[0].rows:
                self._wrong(self._different_rows(SYMBOLS.get(name, name), fields[0].rows, other.rows), at)

    def _different_rows(self, what: str, left: Rows, right: Rows) -> RowsError:
        filtered = left[:2] == ("filter", right) or right[:2] == ("filter", left)
        anew = left[0] == "expand" or right[0] == "expand"
        parent = "left" if anew and made_of(right, left) else "right" if anew and made_of(left, right) else None
        fix = (
            "Put them together first, then filter."
            if filtered
            else "The one was made of rows of the other: bring its fields back with "
            f'rl.collect(<{parent}>, <{"right" if parent == "left" else "left"}>, rewards="mean").'
            if parent
            else "Put together what was made from the same rows, with the same n and the same filters."
        )
        return RowsError(
            f"{what} takes the same rows on both sides; the left has {self._rows_text(left)}, "
            f"the right has {self._rows_text(right)}.",
            fix=fix,
        )

    def not_made_of(self, title: str, parents: Rows, children: Rows, at: At) -> RowsError:
        """The error of an op whose second batch is not made of the rows of the first."""
        return RowsError(
            f"{title} takes rows that were made of those of the batch, which are {self._rows_text(parents)}; "
            f"it was given {self._rows_text(children)}.",
            at=at,
            fix="Give it what was made of this batch, by judge.ask(batch, ...) and judge.generate(...), say.",
        )

    def _rows_text(self, rows: Rows) -> str:
        kind = rows[0]
        if kind == "draw":
            return f"the rows drawn at line {self.tracer.trail.draws[rows[1]].at.line if rows[1] else 0}"
        if kind == "expand":
            number = f"{rows[2]} for each" if isinstance(rows[2], int) else "some for each"
            return f"{number} of {self._rows_text(rows[1])}"
        if kind == "concat":
            return " and ".join(self._rows_text(r) for r in rows[1:])
        call = self.tracer.trail.calls[int(rows[-1])]
        if kind == "filter":
            return f"what line {call.at.line} kept of {self._rows_text(rows[1])}"
        return f"the rows that {call.title} made at line {call.at.line}"


def _kept_marks(name: str, fields: Sequence[TField]) -> Marks:
    """Return of which kind log-probabilities are after an op: a sum over rows, a negative, a product with a mask."""
    if name in ("neg", "row_sum", "row_mean"):
        return logprob_kind(fields[0].marks)
    if name == "mul" and any(f.type.dtype == "bool" for f in fields):
        return UNMARKED.union(*(logprob_kind(f.marks) for f in fields))
    return UNMARKED


def _operand(value: Any) -> str:
    """How an operand is written: a field by its name, a number as it was computed, others as Python does."""
    if isinstance(value, FieldValue):
        text = value.ref.name or value.ref.text or "value"
    elif isinstance(value, (BatchValue, MetricsValue)):
        text = "batch" if isinstance(value, BatchValue) else "metrics"
    else:
        text = value.ref.text if isinstance(value, ScalarValue) else repr(value)
    return text if len(text) <= LONGEST else "..."  # of a number that grows from step to step


def _is_whole(value: Any) -> bool:
    return value.ref.whole if isinstance(value, ScalarValue) else type(value) is int


def _later(name: str, args: Sequence[Any]) -> tuple[int, int] | None:
    """Return which step a result is: ``step - 1`` is one step before ``step``; None where it is no step."""
    shifts = [a for a in args if type(a) is int]
    steps: list[tuple[int, int]] = [a.ref.step for a in args if isinstance(a, Symbol) and a.ref.step is not None]
    if len(steps) != 1 or len(shifts) != 1 or name not in ("add", "sub") or (name == "sub" and args[0] is shifts[0]):
        return None
    loop, before = steps[0]
    return loop, before + shifts[0] * (1 if name == "add" else -1)


def _rows_of(batch: TBatch) -> list[Use]:
    """Return where the rows of a batch come from, without any of their fields."""
    if batch.rows_call is not None:
        return [Use(batch.rows_call, "keys")]
    return [Use(None, "keys", draw=int(batch.rows[1]))] if batch.rows[0] == "draw" and batch.rows[1] else []


def made_of(children: Rows, parents: Rows) -> bool:
    """Whether rows were made of others, which may have lost some since; so it is taken of rows that are made anew.

    >>> made_of(("expand", ("draw", 1), 4), ("filter", ("draw", 1), 7)), made_of(("draw", 2), ("draw", 1))
    (True, False)
    """
    if children == parents or children[0] == "regroup" or parents[0] == "regroup":
        return True
    if parents[0] == "filter":
        return made_of(children, parents[1])
    return children[0] in ("expand", "filter") and made_of(children[1], parents)


def _share_keys(rows: Rows, others: Rows) -> bool:
    """Whether two batches surely have a key in common: the same rows, or samples of the same rows, none left out.

    >>> _share_keys(("expand", ("draw", 1), 4), ("expand", ("draw", 1), 2)), _share_keys(("draw", 2), ("draw", 1))
    (True, False)
    """
    if rows[0] == others[0] == "expand":
        return _share_keys(rows[1], others[1])
    return rows == others and rows[0] in ("draw", "regroup", "concat")


def _other_fields(left: set[str], right: set[str]) -> FieldError:
    """The error of batches with different fields, one below the other."""
    sides = [("left", sorted(left - right)), ("right", sorted(right - left))]
    listed = [(side, ", ".join(map(repr, names))) for side, names in sides if names]
    extra = " and ".join(f"{names} only on the {side}" for side, names in listed)
    drops = " and ".join(f".drop({names}) on the {side}" for side, names in listed)
    what = f"concat takes batches with the same fields; there is {extra}."
    return FieldError(what, fix=f"Give both the same fields, or write {drops}.")


def passed_on(fields: Mapping[str, TField], call: int, rows: Rows) -> dict[str, TField]:
    """Fields as they are after a call that made rows anew."""
    return {
        n: replace(f, name=n, made=n, call=call, rows=rows, sources=(replace(f, name=n),)) for n, f in fields.items()
    }
