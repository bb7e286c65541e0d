"""The session of one path of a trace: it records the calls of a program and checks what they are given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...errors import At, FieldError, FlowError, ProgramError, did_you_mean
from ...marks import IDS, UNMARKED
from ..ops.check_arguments import bad_call, described, wrong_arguments
from ..ops.field_types import FieldType
from ..ops.op import Op
from ..ops.signature import CallShape, Signature
from ..script.site import call_path, caller, instruction, source_path, stores, users_line
from ..script.source_names import Key, named
from ..script.source_names import described as described_source
from ..stand_ins.current_session import nested_steps
from ..stand_ins.scalars import ScalarValue
from ..stand_ins.symbols import INDEX, KEY, OTHER, STORED, Symbol
from ..stand_ins.values import BatchValue, FieldValue, Value, find, is_handle
from .call_errors import adding, new_names, undeclared_reads
from .column_origins import Provenance
from .follow_branches import Path
from .log_names import Logged, Names
from .reported_metrics import recorded, unknown_metric
from .resolve_reads import Reads
from .result_fields import result_of, sampled
from .row_operations import RowOps, made_of
from .trace_records import (
    Adder,
    Draw,
    Rows,
    SourceLike,
    TBatch,
    TCall,
    TField,
    TMetrics,
    TNumber,
    Trail,
    Use,
    together,
)


class Tracer:
    """The session of one path. ``rounds``: the iterations of each loop."""

    def __init__(
        self,
        path: Path,
        adders: Sequence[Adder],
        program: Callable[..., Any],
        meanings: dict[str, tuple[str, At]] | None = None,
        rounds: int = 2,
        owner: Any = None,
    ) -> None:
        self.trail = Trail(path=path)
        self.adders, self.rounds = adders, rounds
        self.row_ops = RowOps(self)
        self.provenance = Provenance(self, owner)
        self.reads = Reads(self)
        self.errors: list[FlowError] = []
        self.at_first: list[tuple[FlowError, int]] = []  # those in the first iteration of a loop, and its number
        self.counted: dict[int, Rows] = {}  # by call, the rows that it counts
        self.waits: dict[At, set[str]] = {}  # of each line that needs a value, what it waits for
        self.code = getattr(program, "__code__", None)
        self.loop, self.iteration, self._loops, self._draws = 0, 0, 0, 0
        self._seen: dict[tuple[Any, ...], int] = {}
        self._source: SourceLike | None = None
        self._named: dict[int, tuple[Key, str]] = {}  # sources by id: what tells them apart, and their names
        self.symbols: dict[str, None] = {}  # how they are written, the last one last
        self._made = 0  # draws, and calls that make rows or fields of workers and libraries
        self._asked: dict[Hashable, tuple[int, int, frozenset[int]]] = {}  # by place of a condition, what was made then
        self._lookup = (0, 0)  # the instruction that asked a symbol for its hash last
        self._names = Names({} if meanings is None else meanings)  # of all paths: what a name stands for

    # -- what a flow asks ---------------------------------------------------------------------------------------

    def steps(self, source: SourceLike, steps: Any) -> Iterator[tuple[Any, Any]]:
        """Two iterations, or as many as there are rounds, with symbolic steps."""
        _expect_source("flow.steps(source, steps)", source)
        if self.loop:
            raise nested_steps()
        self._loops += 1
        number, left = self._loops, True
        endless = caller() if steps is None and getattr(source, "endless", False) else None
        self._source = source
        try:
            for iteration in range(1, self.rounds + 1):
                self.loop, self.iteration = number, iteration
                self.trail.began.add((number, iteration))
                now = TNumber(frozenset(), "step", f"step{number}.{iteration}", "step", True, (number, iteration - 1))
                step = self.symbol(now)
                yield step, self.draw(source, form="steps")
            left = False
        finally:  # also where the program leaves the loop by itself
            self.loop, self.iteration, self._source = 0, 0, None
            if endless is not None:
                self.trail.endless[endless] = self.trail.endless.get(endless, False) or left

    def draw(self, source: SourceLike, count: Any = None, *, form: str = "take") -> Any:
        """Return a batch of the source's next rows, which the program asks for with ``flow.<form>``."""
        self._draws += 1
        self._made += 1
        if form != "more":  # which draws from the source of the step, whatever it is called
            self._named[id(source)] = named(source, form, self.code)
        key, name = self._named[id(source)]
        rows: Rows = ("draw", self._draws)
        schema = source.schema()
        self.trail.draws[self._draws] = Draw(
            number=self._draws,
            key=key,
            name=name,
            describes=described_source(source),
            schema=schema,
            at=caller(),
            loop=self.loop,
            iteration=self.iteration,
            lines=call_path(self.code),
            source=source,
            count=self._count(count),
        )
        ids = self.provenance.of_data(source)
        fields = {
            n: TField(t, None, n, rows, (*rows, n), made=n, marks=ids if n in IDS else UNMARKED)
            for n, t in schema.items()
        }
        return BatchValue(self, TBatch(fields, rows))

    def _count(self, count: Any) -> TNumber | None:
        """Return how many rows the program asks for, where it computes that; else None."""
        if not isinstance(count, ScalarValue):
            return None
        self.trail.logged.update(self.reads.uses(count))
        return count.ref

    def more(self, count: Any) -> Any:
        """Further rows of the source of this step."""
        if self._source is None:
            what = "flow.more was called outside of flow.steps."
            self.wrong(ProgramError(what, at=caller(), fix="Use flow.take(source, n)."))
            return BatchValue(self, TBatch({}, ("draw", 0)))
        return self.draw(self._source, count, form="more")

    def take(self, source: SourceLike, count: Any = None) -> Any:
        """The next rows of another source."""
        _expect_source("flow.take(source, count)", source)
        return self.draw(source, count)

    def log(self, step: Any, values: Sequence[Logged]) -> None:
        """Values that are logged count as used; their names are noted as far as they are known."""
        for value in find([item.value for item in values]):
            self.trail.logged.update(self.reads.uses(value))
        key = step.ref.key if isinstance(step, Value) else step
        for item in values:
            for name in recorded(item, self.trail.calls):
                error = self._names.add((self.loop, self.iteration, key), name, item.of, item.at)
                if error is not None:
                    self.wrong(error)
                    break

    # -- the session protocol -----------------------------------------------------------------------------------

    def field(self, value: Value, name: str) -> Any:
        ref = value.ref
        if isinstance(ref, TMetrics):
            if (error := unknown_metric(ref, name, self.trail.calls, caller())) is not None:
                self.wrong(error)
            key = f"c{ref.call}.{name}"
            return ScalarValue(self, TNumber(frozenset({ref.call}), f"{ref.title}.{name}", key, name))
        assert isinstance(ref, TBatch)
        if name not in ref.fields:
            what = f"the batch has no field '{name}' here."
            fix = did_you_mean(name, ref.fields, adding(name, self.reads.fixes(name, ref.fields)))
            self.wrong(FieldError(what, at=caller(), have=ref.fields, fix=fix))
            return FieldValue(self, TField(FieldType("any"), None, name, ref.rows))
        known = ref.fields[name]
        return FieldValue(self, replace(known, name=name, rows=ref.rows))

    def read(self, value: Value, kind: type) -> Any:
        at = users_line()
        ref = value.ref
        if isinstance(ref, TField):
            one = "a condition takes one" if kind is bool else f"{kind.__name__}() takes one"
            keep = ", or keep rows with batch.filter(...)" if kind is bool and not ref.type.dims else ""
            whose = f"'{ref.name}'" if ref.name else "A field"
            fix = f"Reduce it first, with .mean(), .sum(), .min() or .max(){keep}."
            self.wrong(ProgramError(f"{whose} has a value for each row, and {one}.", at=at, fix=fix))
            return False if kind is bool else 1.0
        if isinstance(ref, TMetrics):
            ref = TNumber(frozenset({ref.call}), ref.title, f"c{ref.call}")
        assert isinstance(ref, TNumber)
        if not isinstance(value, Symbol):
            self._note_wait(ref, at)
        if kind is bool:
            return self._ask(ref, at)
        if kind is int and not ref.whole:
            ref = together([ref], f"int({ref.text})", f"int({ref.key})", whole=True)
        return self.symbol(ref)

    def _ask(self, ref: TNumber, at: At) -> bool:
        place = (self.loop, source_path(self.code))
        loops = self.goes_round(ref, place)
        return self.trail.path.ask(ref.key, ref.text, at, self.iteration, ref.calls, place=place, loops=loops)

    def goes_round(self, ref: TNumber, place: Hashable) -> bool:
        """Whether a condition is that of a loop on a value, which went round since it was asked last at this place.

        Then something was made in between, and the condition looks at that, or at what it looked at before.
        """
        made, calls = self._made, len(self.trail.calls)
        behind = frozenset(call.index for call in self._workers_behind(ref.calls))
        made_then, calls_then, behind_then = self._asked.get((place, self.iteration), (made, calls, behind))
        self._asked[(place, self.iteration)] = made, calls, behind
        return made > made_then and (behind == behind_then or max(behind, default=-1) >= calls_then)

    def symbol(self, ref: TNumber) -> Any:
        """The symbol of a number, or the plain number where a library takes no other."""
        symbol = Symbol(self, ref)
        self.symbols.pop(ref.text, None)
        self.symbols[ref.text] = None
        return symbol.plain(OTHER) if ref.text in self.trail.path.numbers.plain else symbol

    def number(self, value: Value, way: str) -> int:
        """The plain number that stands for a symbol where Python insists on one. What it comes from counts as used."""
        ref: TNumber = value.ref
        path = self.trail.path
        key, shift = ref.key, 0
        if ref.step is not None:  # steps stay in order: one is the next one's predecessor
            key, shift = f"step{ref.step[0]}", ref.step[1]
        if not way:
            return path.chosen(key) + shift
        self.trail.logged.update(self.reads.uses(value))
        way = STORED if way in (INDEX, KEY) and stores() else way
        return path.number(key, ref.text, users_line(), self.iteration, ref.calls, way=way, shift=shift)

    def hashes(self) -> None:
        """A symbol is about to be looked up, in a dict or a set."""
        self._lookup = instruction()

    def looks_up(self) -> bool:
        """Whether a comparison is part of the look-up that has just asked for a hash."""
        return self._lookup == instruction()

    def call(self, op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if op.owner == "batch":
            return self.row_ops.call(op, args)
        at = caller()
        kwargs = dict(kwargs)
        title = f"{worker.name if worker else op.owner}.{op.name}"
        into = new_names(title, kwargs.pop("into", None), op, at)
        try:
            arguments = op.bind(args, kwargs)
        except TypeError as error:
            self.wrong(bad_call(title, op.parameters.named, kwargs, error, at, ProgramError))
            first = next((a for a in args if isinstance(a, BatchValue)), None)
            arguments = {} if first is None else {op.batch_parameter: first}
        main = arguments.get(op.batch_parameter)
        batch = main.ref if isinstance(main, BatchValue) else None
        have = frozenset(batch.fields) if batch else frozenset[str]()
        try:
            each, by = (None, "") if batch is None else sampled(batch, self.trail.calls)
            signature = op.signature(worker.arguments if worker else {}, arguments, have, rows_each=each, sampled_by=by)
            if worker:
                worker.cls.check_call(op.name, have)
        except FlowError as error:
            error.at = error.at or at
            self.wrong(error)
            added: dict[str, FieldType] = {}
            with suppress(FlowError):
                added = op.added(CallShape(worker.arguments if worker else {}, arguments, have))
            signature = Signature({}, added, op.rows)
        wrong = wrong_arguments(op, title, arguments, signature, at)
        for error in (*wrong, *undeclared_reads(op, title, arguments, signature)):
            self.wrong(error)
        if op.children:
            self._check_children(title, batch, arguments.get(op.children), at)
        uses = self.reads.of_call(title, arguments, signature, at)
        others = [value for value in arguments.values() if not isinstance(value, BatchValue)]
        uses += [use for value in find(others) for use in self.reads.uses(value)]
        serves = tuple(v.name for v in arguments.values() if is_handle(v))
        given = {**arguments, "into": into} if into else arguments
        call = self.record(op, worker.name if worker else op.owner, at, signature, uses, serves, given)
        call.others = self.provenance.check(op, worker, title, arguments, signature, at)
        marks = self.provenance.added(op, worker, arguments, batch)
        return result_of(self, call, batch, into, arguments, marks)

    # -- inside ---------------------------------------------------------------------------------------------------

    def record(
        self,
        op: Op,
        worker: str,
        at: At,
        signature: Signature,
        uses: Iterable[Use],
        serves: tuple[str, ...] = (),
        arguments: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> TCall:
        place = (self.loop, worker, op.name, *call_path(self.code))
        again = self._seen[(*place, self.iteration)] = self._seen.get((*place, self.iteration), 0) + 1
        call = TCall(
            index=len(self.trail.calls),
            op=op,
            worker=worker,
            at=at,
            place=(*place, again),
            loop=self.loop,
            iteration=self.iteration,
            signature=signature,
            updates=op.updates,
            uses=tuple(dict.fromkeys(uses)),
            serves=serves,
            arguments=dict(arguments or {}),
            text=text,
        )
        self.trail.calls.append(call)
        self._made += op.owner != "batch" or signature.rows != "same"
        return call

    def _check_children(self, title: str, batch: TBatch | None, children: Any, at: At) -> None:
        """The rows of the second batch were made of those of the first, which may have been filtered since."""
        if not isinstance(children, BatchValue):
            self.wrong(ProgramError(f"{title} takes a batch, and was given {described(children)}.", at=at))
        elif batch is not None and not made_of(children.ref.rows, batch.rows):
            self.wrong(self.row_ops.not_made_of(title, batch.rows, children.ref.rows, at))

    def wrong(self, error: FlowError) -> None:
        self.errors.append(error)
        if self.iteration == 1:
            self.at_first.append((error, self.loop))

    def _note_wait(self, ref: TNumber, at: At) -> None:
        self.waits.setdefault(at, set()).update(call.title for call in self._workers_behind(ref.calls))

    def _workers_behind(self, calls: Iterable[int]) -> list[TCall]:
        """The calls of workers and libraries that arithmetic goes back to."""
        behind: dict[int, TCall] = {}
        waiting, seen = list(calls), set(calls)
        while waiting:
            call = self.trail.calls[waiting.pop()]
            if call.op.owner == "batch":
                waiting += call.makers - seen
                seen |= call.makers
            else:
                behind[call.index] = call
        return list(behind.values())


def _expect_source(form: str, given: Any) -> None:
    if not hasattr(given, "schema"):
        name = getattr(given, "__name__", "")
        raise ProgramError(
            f"{form} takes a source of data, and was given {described(given)}.",
            at=caller(),
            fix=f"Call it: {name}(...)."
            if name
            else "Give a source, such as fl.data.jsonl(path, batch=16), as the first argument.",
        )
