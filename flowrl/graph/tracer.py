"""The session of one path of a trace: it records the calls of a program and checks what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from ..errors import At, FieldError, FlowError, ProgramError, near
from ..marks import IDS, UNMARKED, Marks
from .logged import Logged, Names
from .op import CallShape, Op, Signature, Spec, bad_call, described, missing_field, written_twice
from .oracle import Path
from .provenance import Provenance
from .rowops import RowOps, made_of, passed_on
from .session import nested_steps
from .site import call_path, caller
from .sources import Key, named
from .sources import described as described_source
from .terms import (
    Adder,
    Draw,
    Lint,
    Rows,
    SourceLike,
    Symbol,
    TBatch,
    TCall,
    TField,
    TMetrics,
    TNumber,
    Trail,
    Use,
    rows_each,
)
from .types import FieldType
from .values import BatchValue, FieldValue, MetricsValue, ScalarValue, Value, find, is_handle

#: Metrics that every update has, and those that it has or may have.
ALWAYS_REPORTED = ("loss", "grad_norm", "lr", "tokens", "rows", "steps")
UPDATES = (*ALWAYS_REPORTED, "truncated", "pretraining_loss")


_RESPONSES = "Give the source response=, the column to learn from; or sample with actor.generate before this line."
_PAIRS = "Give the source rejected=, the column of the worse response, beside response=."
#: Fields that a loss reads and rows of data may have, with the option of the source that gives them.
_OF_DATA = {"tokens": _RESPONSES, "response_mask": _RESPONSES, "response_ids": _RESPONSES, "preferred": _PAIRS}


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
        self.errors: list[FlowError] = []
        self.lints: list[Lint] = []
        self.code = getattr(program, "__code__", None)
        self.loop, self.iteration, self._loops, self._draws = 0, 0, 0, 0
        self._seen: dict[tuple[Any, ...], int] = {}
        self._source: SourceLike | None = None
        self._named: dict[int, tuple[Key, str]] = {}  # sources by id: what tells them apart, and their names
        self._missed: set[tuple[str, Rows]] = set()
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
                step = Symbol(self, TNumber(frozenset(), "step", f"step{number}.{iteration}", "step"))
                yield step, self.draw(source, form="steps")
            left = False
        finally:  # also where the program leaves the loop by itself
            self.loop, self.iteration, self._source = 0, 0, None
            if endless is not None:
                self.trail.endless[endless] = self.trail.endless.get(endless, False) or left

    def draw(self, source: SourceLike, count: Any = None, *, form: str = "take") -> Any:
        """A batch of the source's next rows, which the program asks for with ``flow.<form>``."""
        del count
        self._draws += 1
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
        )
        ids = self.provenance.of_data(source)
        fields = {
            n: TField(t, None, n, rows, (*rows, n), made=n, marks=ids if n in IDS else UNMARKED)
            for n, t in schema.items()
        }
        return BatchValue(self, TBatch(fields, rows))

    def more(self, count: Any) -> Any:
        """Further rows of the source of this step."""
        if self._source is None:
            self.wrong(
                ProgramError(
                    "flow.more was called outside of flow.steps.", at=caller(), fix="Use flow.take(source, n)."
                )
            )
            return BatchValue(self, TBatch({}, ("draw", 0)))
        return self.draw(self._source, count, form="more")

    def take(self, source: SourceLike, count: Any = None) -> Any:
        """The next rows of another source."""
        _expect_source("flow.take(source, count)", source)
        return self.draw(source, count)

    def log(self, step: Any, values: Sequence[Logged]) -> None:
        """Values that are logged count as used; their names are noted as far as they are known."""
        for value in find([item.value for item in values]):
            self.trail.logged.update(self.uses(value))
        key = step.ref.key if isinstance(step, Value) else step
        for item in values:
            for name in self._recorded(item):
                error = self._names.add((self.loop, self.iteration, key), name, item.of, item.at)
                if error is not None:
                    self.wrong(error)
                    break

    def _recorded(self, item: Logged) -> list[str]:
        """The names under which something is recorded. Of metrics those that every update has, and its loss reports."""
        if not item.is_metrics:
            return [item.name]
        if not isinstance(item.value, MetricsValue):
            made_by_hand = cast("Mapping[str, Any]", item.value)
            return [item.under(name) for name in made_by_hand]
        ref: TMetrics = item.value.ref
        loss: Any = self.trail.calls[ref.call].arguments.get("loss")
        if not isinstance(loss, Spec):
            return []
        return [item.under(name) for name in (*ALWAYS_REPORTED, *getattr(loss, "reports", ()))]

    # -- the session protocol -----------------------------------------------------------------------------------

    def field(self, value: Value, name: str) -> Any:
        ref = value.ref
        if isinstance(ref, TMetrics):
            self._known_metric(ref, name)
            key = f"c{ref.call}.{name}"
            return ScalarValue(self, TNumber(frozenset({ref.call}), f"{ref.title}.{name}", key, name))
        assert isinstance(ref, TBatch)
        if name not in ref.fields:
            meant = near(name, ref.fields)
            self.wrong(
                FieldError(
                    f"the batch has no field '{name}' here.",
                    at=caller(),
                    have=ref.fields,
                    fix=f"Did you mean '{meant}'?" if meant else _adding(name, self.fixes(name, ref.fields)),
                )
            )
            return FieldValue(self, TField(FieldType("any"), None, name, ref.rows))
        found = ref.fields[name]
        return FieldValue(self, replace(found, name=name, rows=ref.rows))

    def _known_metric(self, ref: TMetrics, name: str) -> None:
        """An update whose loss says what it reports has these metrics, and its own."""
        loss: Any = self.trail.calls[ref.call].arguments.get("loss")
        told: tuple[str, ...] = getattr(loss, "reports", ())
        if not told or name in (*UPDATES, *told):
            return
        have = [*UPDATES, *told]
        meant = near(name, have)
        fix = f"Did you mean '{meant}'?" if meant else None
        if name in ("kl", "entropy"):
            fix = f"Give {name}= of the loss a weight above 0."
        self.wrong(FieldError(f"the metrics of {ref.title} have no '{name}'.", at=caller(), have=have, fix=fix))

    def read(self, value: Value, kind: type) -> Any:
        at = caller()
        if isinstance(value, BatchValue):
            return True
        ref = value.ref
        if isinstance(ref, TField):
            one = "a condition takes one" if kind is bool else f"{kind.__name__}() takes one"
            keep = ", or keep rows with batch.filter(...)" if kind is bool and not ref.type.dims else ""
            self.wrong(
                ProgramError(
                    f"'{ref.name}' has a value for each row, and {one}."
                    if ref.name
                    else f"A field has a value for each row, and {one}.",
                    at=at,
                    fix=f"Reduce it first, with .mean(), .sum(), .min() or .max(){keep}.",
                )
            )
            return False if kind is bool else 1.0
        if isinstance(ref, TMetrics):
            ref = TNumber(frozenset({ref.call}), ref.title, f"c{ref.call}")
        assert isinstance(ref, TNumber)
        if not isinstance(value, Symbol):
            self._lint_read(ref, at)
        if kind is bool:
            return self.trail.path.ask(ref.key, ref.text, at, self.iteration, ref.calls)
        return Symbol(self, ref)

    def call(self, op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if op.owner == "batch":
            return self.row_ops.call(op, args)
        at = caller()
        kwargs = dict(kwargs)
        into = dict(kwargs.pop("into", None) or {})
        try:
            arguments = op.bind(worker, args, kwargs)
        except TypeError as error:
            self.wrong(self._bad_arguments(op, worker, error, kwargs, at))
            first = next((a for a in args if isinstance(a, BatchValue)), None)
            arguments = {} if first is None else {op.batch_parameter: first}
        main = arguments.get(op.batch_parameter)
        batch = main.ref if isinstance(main, BatchValue) else None
        have = frozenset(batch.fields) if batch else frozenset[str]()
        title = f"{worker.name if worker else op.owner}.{op.name}"
        try:
            each, by = (None, "") if batch is None else self._rows_each(batch)
            signature = op.signature(worker.arguments if worker else {}, arguments, have, rows_each=each, sampled_by=by)
        except FlowError as error:
            error.at = error.at or at
            self.wrong(error)
            added: dict[str, FieldType] = {}
            with suppress(FlowError):
                added = op.added(CallShape(worker.arguments if worker else {}, arguments, have))
            signature = Signature({}, added, op.rows)
        self._check_arguments(op, title, arguments, signature, at)
        if op.children:
            self._check_children(title, batch, arguments.get(op.children), at)
        uses = self._read_fields(title, arguments, signature, at)
        uses += [
            u for v in arguments.values() if not isinstance(v, BatchValue) for x in find([v]) for u in self.uses(x)
        ]
        serves = tuple(v.name for v in arguments.values() if is_handle(v))
        said = {**arguments, "into": into} if into else arguments
        call = self.record(op, worker.name if worker else op.owner, at, signature, uses, serves, said)
        call.others = self.provenance.check(op, worker, title, arguments, signature, at)
        return self._result(call, batch, into, arguments, self.provenance.added(op, worker, arguments, batch))

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
            decided=tuple(d for d in self.trail.path.taken if d.iteration == self.iteration),
            arguments=dict(arguments or {}),
            text=text,
        )
        self.trail.calls.append(call)
        return call

    def _result(
        self,
        call: TCall,
        batch: TBatch | None,
        into: Mapping[str, str],
        arguments: Mapping[str, Any],
        marks: Mapping[str, Marks],
    ) -> Any:
        op, signature, at = call.op, call.signature, call.at
        if op.returns == "metrics":
            return MetricsValue(self, TMetrics(call.index, call.title))
        if op.returns == "scalar":
            return ScalarValue(self, TNumber(frozenset({call.index}), call.title, f"c{call.index}"))
        if op.returns == "none":
            return None
        for word in sorted(set(into) - set(signature.adds)):
            meant = near(word, signature.adds)
            self.wrong(
                FieldError(
                    f"{call.title} adds no '{word}' that into= could rename.",
                    at=at,
                    have=signature.adds,
                    fix=f"Did you mean '{meant}'?" if meant else None,
                )
            )
            if meant:
                into = {meant: into[word], **into}
        inherited = dict(batch.fields) if batch and op.inherits else {}
        rows, rows_call = self._rows_after(call, batch, arguments)
        if op.rows in ("expand", "filter"):  # rows were made anew: what is read later comes from here
            inherited = passed_on(inherited, call.index, rows)
        added = {into.get(n, n): (t, marks.get(n, UNMARKED)) for n, t in signature.adds.items()}
        if twice := [n for n in added if n in inherited]:
            self.wrong(written_twice(call.title, twice, at))
        for name, (type_, own) in added.items():
            inherited[name] = TField(type_, call.index, name, rows, (call.index, name), made=name, marks=own)
        return BatchValue(self, TBatch(inherited, rows, rows_call))

    def _rows_after(self, call: TCall, batch: TBatch | None, arguments: Mapping[str, Any]) -> tuple[Rows, int | None]:
        if batch is None or call.op.rows == "regroup":
            return ("regroup", call.index), call.index
        if call.op.rows in ("same", "apart"):
            return batch.rows, batch.rows_call
        n = arguments.get("n")
        if call.op.rows == "expand" and isinstance(n, int):
            return ("expand", batch.rows, n), call.index
        made: Any = (call.index,) if call.op.rows == "expand" else call.index  # no number, as nobody knows how many
        return (call.op.rows, batch.rows, made), call.index

    def _rows_each(self, batch: TBatch) -> tuple[int | None, str]:
        """How many rows each prompt has at most, and the call that sampled them; None where either is not known."""
        if batch.rows_call is None or "preferred" in batch.fields:  # a source of pairs has two rows of each prompt
            return None, ""
        made = self.trail.calls[: batch.rows_call + 1]
        sampled = next((call for call in reversed(made) if call.op.rows == "expand"), None)
        return (None, "") if sampled is None else (rows_each(batch.rows), f"{sampled.title} (line {sampled.at.line})")

    def _check_arguments(self, op: Op, title: str, arguments: Mapping[str, Any], signature: Signature, at: At) -> None:
        """Values that are allowed, a batch where fields are read, a loss where one is declared."""
        for error in op.wrong_values(arguments, title):
            error.at = at
            self.wrong(error)
        for param, value in arguments.items():
            if signature.reads.get(param) and not isinstance(value, BatchValue):
                given = described(value)
                fix = "Give the batch"
                if isinstance(value, MetricsValue):
                    fix += "; an update gives metrics"
                elif value is None:
                    fix += "; a function that makes one must return it"
                self.wrong(ProgramError(f"{title} takes a batch, and was given {given}.", at=at, fix=f"{fix}."))
            declared = op.parameters.parameters.get(param)
            if declared is not None and declared.annotation in ("Spec", Spec) and not isinstance(value, Spec):
                name = getattr(value, "__name__", "")
                fix = (
                    f"Call it: {param}={name}(...)."
                    if name
                    else "Give what rl.ppo_clip(), rl.sft() or a loss of your own gives."
                )
                self.wrong(
                    ProgramError(f"{title}: {param}= takes a loss, and was given {described(value)}.", at=at, fix=fix)
                )

    def _check_children(self, title: str, batch: TBatch | None, children: Any, at: At) -> None:
        """The rows of the second batch were made of those of the first, which may have been filtered since."""
        if not isinstance(children, BatchValue):
            self.wrong(ProgramError(f"{title} takes a batch, and was given {described(children)}.", at=at))
        elif batch is not None and not made_of(children.ref.rows, batch.rows):
            self.wrong(self.row_ops.not_made_of(title, batch.rows, children.ref.rows, at))

    def _read_fields(self, title: str, arguments: Mapping[str, Any], signature: Signature, at: At) -> list[Use]:
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
                        fixes, made = self.fixes(name, batch.fields), self._made_apart(name)
                        if specs and batch.rows[:1] == ("draw",) and name in _OF_DATA:
                            made = made or _OF_DATA[name]
                            self._missed.update((n, batch.rows) for n in _OF_DATA)
                        self.wrong(missing_field(reader, name, batch.fields, at, fixes, made))
                    self._missed.add((name, batch.rows))
                    continue
                found = batch.fields[name]
                if type_ is not None and not type_.accepts(found.type):
                    self.wrong(self._wrong_type(reader, name, type_, found, at))
                uses += self.use(found, name)
            if batch.rows_call is not None and all(use.call != batch.rows_call for use in uses):
                uses.append(Use(batch.rows_call, "keys"))
        return uses

    def _wrong_type(self, reader: str, name: str, wanted: FieldType, found: TField, at: At) -> FieldError:
        maker = "the data" if found.call is None else self.trail.calls[found.call].title
        what = "has another dtype" if wanted.dims == found.type.dims else "has other dims"
        return FieldError(
            f"{reader} reads '{name}: {wanted}', but '{name}' {what} here: {maker} gives {found.type}.",
            at=at,
            fix=f"Make {maker} give {wanted}, or read another field.",
        )

    def use(self, found: TField, name: str) -> list[Use]:
        """What gives a field. Calls that made its rows anew read it from where it was before."""
        if found.call is None:
            drawn = found.origin[:1] == ("draw",)
            return [Use(None, name, found.made, int(found.origin[1]))] if drawn else []
        passing = self.trail.calls[found.call]
        for source in found.sources:
            more = self.use(source, source.name)
            makers = {use.call for use in more}
            kept = [u for u in passing.uses if u.name != "keys" or u.call not in makers]  # rows come along with a field
            passing.uses = tuple(dict.fromkeys([*kept, *more]))
        return [Use(found.call, name, found.made)]

    def uses(self, value: Value) -> list[Use]:
        """What a value comes from: calls and draws, each with the field or number that is used."""
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
        """Where a missing field was added in this step, but to another batch."""
        for call in reversed(self.trail.calls):
            if call.iteration == self.iteration and name in call.signature.adds and not call.arguments.get("into"):
                return (
                    f"Line {call.at.line} adds it to the batch that it returns: "
                    f"write batch = {call.title}(batch) there, or join the two."
                )
        return None

    def fixes(self, name: str, have: Iterable[str]) -> list[str]:
        """Calls that would add a field: those that could be made here, before those that lack a field themselves."""
        fields = frozenset(have)
        adding = [a for a in self.adders if name in a.adds]
        ready = [a for a in adding if a.reads <= fields] or adding
        return [a.text for a in ready if not a.new][:2] or [a.text for a in ready[:1]]

    def _bad_arguments(self, op: Op, worker: Any, error: TypeError, kwargs: Mapping[str, Any], at: At) -> ProgramError:
        title = f"{worker.name if worker else op.owner}.{op.name}"
        known, fix = bad_call(op.parameters.parameters, kwargs, error)
        return ProgramError(f"{title}: {error}.", at=at, have=known, fix=fix)

    def wrong(self, error: FlowError) -> None:
        self.errors.append(error)

    def _lint_read(self, ref: TNumber, at: At) -> None:
        waits = ", ".join(sorted({c.title for c in self._workers_behind(ref.calls)})) or "the data"
        self.lints.append(Lint("serial", f"this line waits for {waits}: steps cannot overlap past it.", at))

    def _workers_behind(self, calls: Iterable[int]) -> list[TCall]:
        """The calls of workers and libraries that arithmetic goes back to."""
        found: dict[int, TCall] = {}
        waiting = list(calls)
        while waiting:
            call = self.trail.calls[waiting.pop()]
            if call.op.owner == "batch":
                waiting += call.makers
            else:
                found[call.index] = call
        return list(found.values())


def _adding(name: str, fixes: Sequence[str]) -> str:
    return f"Add {' or '.join(fixes)} before this line." if fixes else f"Add an op that adds '{name}' before this line."


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
