"""What the calls of a trace read: where each field comes from, and what is said of one that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import At, FieldError
from ..ops.field_types import FieldType
from ..ops.function_spec import Spec
from ..ops.signature import Signature
from ..stand_ins.values import BatchValue, Value
from .call_errors import missing_field
from .trace_records import Rows, TBatch, TField, TMetrics, TNumber, Use

if TYPE_CHECKING:
    from .tracer import Tracer

_RESPONSES = "Give the source response=, the column to learn from; or sample with actor.generate before this line."
_PAIRS = "Give the source rejected=, the column of the worse response, beside response=."
#: Fields that a loss reads and rows of data may have, with the option of the source that gives them.
_OF_DATA = {"tokens": _RESPONSES, "response_mask": _RESPONSES, "response_ids": _RESPONSES, "preferred": _PAIRS}


_PER_TOKEN = ("*response",)


class Reads:
    """The reads of one path of a trace."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._missed: set[tuple[str, Rows]] = set()

    def of_call(self, title: str, arguments: Mapping[str, Any], signature: Signature, at: At) -> list[Use]:
        uses: list[Use] = []
        specs = [(s.name, s.reads) for s in arguments.values() if isinstance(s, Spec)]
        for param, value in arguments.items():
            if not isinstance(value, BatchValue):
                continue
            batch: TBatch = value.ref
            wanted = signature.reads.get(param)
            if wanted is None:
                wanted = dict.fromkeys(batch.fields)
            for name, type_ in wanted.items():
                by = next((s for s, reads in specs if name in reads.replace(",", " ").replace(":", " ").split()), None)
                reader = f"{title} with loss {by}" if by else title
                if name not in batch.fields:
                    if (name, batch.rows) not in self._missed:  # who reads it next has the same to say
                        fixes, fix = self.fixes(name, batch.fields), self._made_apart(name)
                        if specs and batch.rows[:1] == ("draw",) and name in _OF_DATA:
                            fix = fix or _OF_DATA[name]
                            self._missed.update((n, batch.rows) for n in _OF_DATA)
                        self.tracer.wrong(missing_field(reader, name, batch.fields, at, fixes, fix))
                    self._missed.add((name, batch.rows))
                    continue
                field = batch.fields[name]
                if type_ is not None and not type_.accepts(field.type):
                    self.tracer.wrong(self._wrong_type(reader, name, type_, batch, at))
                uses += self.use(field, name)
            if batch.rows_call is not None and all(use.call != batch.rows_call for use in uses):
                uses.append(Use(batch.rows_call, "keys"))
        return uses

    def _wrong_type(self, reader: str, name: str, wanted: FieldType, batch: TBatch, at: At) -> FieldError:
        found = batch.fields[name]
        maker = self.tracer.row_ops.maker(found)
        what = "has another dtype" if wanted.dims == found.type.dims else "has other dims"
        return FieldError(
            f"{reader} reads '{name}: {wanted}', but '{name}' {what} here: {maker} gives {found.type}.",
            at=at,
            fix=self._spread(name, wanted, batch) or f"Make {maker} give {wanted}, or read another field.",
        )

    def _spread(self, name: str, wanted: FieldType, batch: TBatch) -> str | None:
        """Return the fix of a field with a number per row where one per response token is read; else None."""
        found = batch.fields[name]
        plain = found.made if found.made not in ("", name) else ""
        fits = (found.type.dtype, found.type.dims, wanted.dims) == (wanted.dtype, (), _PER_TOKEN)
        of_data = found.call is None and not plain
        if not fits or of_data or "response_mask" not in batch.fields:
            return None
        if not plain and found.call is not None and self.tracer.trail.calls[found.call].op.owner != "batch":
            maker = self.tracer.row_ops.maker(found)
            return f"Make {maker} give {wanted}: batch.response_mask * ... is the number of its row at each token."
        number = f"batch.{plain}" if plain else "(...)"
        whole = f'batch.with_columns({{"{name}": batch.response_mask * {number}}})'
        if (name, plain) == ("advantages", "rewards"):
            whole = f'batch = rl.advantages(batch, center="none", scale="none"), or {whole}'
        return f"Write {whole}: each token gets the number of its row."

    def use(self, found: TField, name: str) -> list[Use]:
        """Return what gives a field. Calls that made its rows anew read it from where it was before."""
        if found.call is None:
            drawn = found.origin[:1] == ("draw",)
            return [Use(None, name, found.made, int(found.origin[1]))] if drawn else []
        passing = self.tracer.trail.calls[found.call]
        for source in found.sources:
            more = self.use(source, source.name)
            makers = {use.call for use in more}
            kept = [u for u in passing.uses if u.name != "keys" or u.call not in makers]  # rows come along with a field
            passing.uses = tuple(dict.fromkeys([*kept, *more]))
        return [Use(found.call, name, found.made)]

    def uses(self, value: Value) -> list[Use]:
        """Return what a value comes from: calls and draws, each with the field or number that is used."""
        ref = value.ref
        if isinstance(ref, TField):
            return self.use(ref, ref.name or "value")
        if isinstance(ref, TNumber):
            return [Use(c, ref.label) for c in sorted(ref.calls)]
        if isinstance(ref, TMetrics):
            return [Use(ref.call, "metrics")]
        if isinstance(ref, TBatch):
            return [u for n, f in ref.fields.items() for u in self.use(f, n)]
        return []

    def _made_apart(self, name: str) -> str | None:
        """Return the fix where a missing field was added in this step, but to another batch; else None."""
        for call in reversed(self.tracer.trail.calls):
            in_this_step = call.iteration == self.tracer.iteration
            if in_this_step and name in call.signature.adds and not call.arguments.get("into"):
                return (
                    f"Line {call.at.line} adds it to the batch that it returns: "
                    f"write batch = {call.title}(batch) there, or join the two."
                )
        return None

    def fixes(self, name: str, have: Iterable[str]) -> list[str]:
        """Calls that would add a field: those that could be made here, before those that lack a field themselves."""
        fields = frozenset(have)
        adding = [a for a in self.tracer.adders if name in a.adds]
        ready = [a for a in adding if a.reads <= fields] or adding
        return [a.text for a in ready if not a.new][:2] or [a.text for a in ready[:1]]
