"""A program flown on the virtual clock: it runs with real steps and symbols for values, and its calls take no time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import At
from ..graph.may_see_older_weights import site
from ..graph.ops.op import Op
from ..graph.ops.signature import Signature
from ..graph.script.site import source_path, users_line
from ..graph.script.surroundings import Surroundings
from ..graph.stand_ins import current_session as sessions
from ..graph.stand_ins.replaced_builtins import shims
from ..graph.stand_ins.values import PYTHON, BatchValue, Value, find
from ..graph.tracing.follow_branches import ENDLESS, Path
from ..graph.tracing.trace_records import Rows, SourceLike, TCall, TField, TNumber, Use
from ..graph.tracing.tracer import Tracer
from .events import Call
from .scheme import Scheme

_STEPS = 100  # of a program that goes on until its data end, unless it is told how many


class Clock(Protocol):
    """What a program is flown against: it enters and leaves steps, makes calls and waits for their results."""

    def open(self, step: int) -> None: ...
    def issue(self, call: Call) -> None: ...
    def wait_for(self, ids: Sequence[int]) -> None: ...
    def close(self, step: int) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Made:
    """A call of a flown program: ``Made(call, rows=512)``, with the rows of its batch after it.

    ``sources`` are those that its rows were drawn from; ``prompts`` as many as were drawn, 0 where that is not known.
    """

    call: TCall
    step: int
    rows: int
    inputs: tuple[int, ...] = ()
    sources: tuple[Any, ...] = ()
    prompts: int = 0


class Flight(Tracer):
    """The session of a flown program. ``steps`` cuts every loop short; ``note`` is told of each call before it is made.

    Where the program asks for a value, the clock goes on until it is there. A condition on numbers of rows is computed,
    as if filters kept all; any other is taken as False. What was taken is in ``assumed`` with its line.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        clock: Clock,
        scheme: Scheme,
        *,
        steps: int | None,
        note: Callable[[Made], int],
    ) -> None:
        super().__init__(Path(), (), program)
        self.clock, self.scheme = clock, scheme
        self.assumed: dict[str, At] = {}
        self._most, self._note = steps, note
        self._rounds: dict[Hashable, int] = {}  # how often a condition of a step had an outcome
        self._opened = 0
        self._inside = False
        self._sizes: dict[int, int] = {}
        self._drawn: dict[int, Any] = {}  # sources by draw
        self._from: dict[int, tuple[Any, ...]] = {}  # sources of the rows of a call
        self._regrouped: dict[int, int] = {}
        self._cuttable: set[int] = set()  # calls whose results come in chunks, or are batches that can be cut into some

    def fly(self, program: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
        """Run the program to its end, and let the clock go on until all is done. Raises FlowError as a trace does."""
        around = Surroundings(program)
        try:
            with sessions.using(self), shims(program):
                program(**parameters)
        finally:
            around.restore()
        self.clock.end()
        if self.errors:
            raise self.errors[0]

    def steps(self, source: SourceLike, steps: Any) -> Iterator[tuple[Any, Any]]:
        """As many steps as the program asks for, numbered by real numbers."""
        asked = steps if isinstance(steps, int) else _STEPS if self._most is None else self._most
        self._loops += 1
        number = self._loops
        self._source = source
        try:
            for step in range(asked if self._most is None else min(asked, self._most)):
                self.loop, self.iteration = number, step + 1
                self.clock.open(self._opened)
                self._inside = True
                yield step, self.draw(source, form="steps")
                self._shut()
        finally:
            if self._inside:
                self._shut()
            self.loop, self.iteration, self._source = 0, 0, None

    def _shut(self) -> None:
        self._inside = False
        self.clock.close(self._opened)
        self._opened += 1

    def draw(self, source: SourceLike, count: Any = None, *, form: str = "take") -> Any:
        value = super().draw(source, count, form=form)
        self._drawn[self._draws] = source
        self._sizes[self._draws] = count if isinstance(count, int) else int(getattr(source, "batch", 1))
        return value

    def read(self, value: Value, kind: type) -> Any:
        ref = value.ref
        if isinstance(ref, TNumber) and ref.calls:
            self.clock.wait_for(sorted(ref.calls))
            if kind is bool:
                known = len(self.trail.path.taken)
                if (outcome := self._of_rows(ref)) is not None:
                    self._assume(ref.text, outcome, users_line())
                    return outcome
                outcome = super().read(value, kind)
                for decision in self.trail.path.taken[known:]:
                    self._assume(decision.condition, decision.outcome, decision.at)
                return outcome
        return super().read(value, kind)

    def _assume(self, condition: str, outcome: bool, at: At) -> None:
        self.assumed.setdefault(condition if outcome else f"not ({condition})", at)

    def _of_rows(self, ref: TNumber) -> bool | None:
        """The outcome of a condition on numbers of rows, the other one where a loop goes on and on; None on others."""
        sizes = {f"c{call}": size for call, rows in self.counted.items() if (size := self.count(rows))}
        number = None
        with suppress(SyntaxError):  # no term that Python reads
            number = _computed(ast.parse(ref.key, mode="eval").body, sizes)
        if number is None:
            return None
        place = (self._opened, source_path(self.code))
        key = (place, bool(number))
        self._rounds[key] = self._rounds.get(key, 0) + 1
        most = _ROUNDS if self.goes_round(ref, place) else ENDLESS
        return bool(number) == (self._rounds[key] <= most)

    def number(self, value: Value, way: str) -> int:
        known = len(self.trail.path.taken)
        number = super().number(value, way)
        for decision in self.trail.path.taken[known:]:
            self.assumed.setdefault(f"{value.ref.text} == {number}", decision.at)
        return number

    def _note_wait(self, ref: TNumber, at: At) -> None:
        del ref, at  # the check has said it; here it only costs time

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
        given = dict(arguments or {})
        makers = dict.fromkeys(use.call for use in uses if use.call is not None)
        rows, prompts, sources = 0, 0, dict[int, Any]()
        for value in find(list(given.values())):
            if isinstance(value, BatchValue):
                rows = rows or self.count(value.ref.rows)
                prompts = prompts or self.count(value.ref.rows, expanded=False)
                sources |= {id(s): s for s in self.sources(value.ref.rows)}
                if op.rows != "same":  # rows made anew take along every field
                    makers |= dict.fromkeys(use.call for use in self.reads.uses(value) if use.call is not None)
        call = super().record(op, worker, at, signature, [Use(m, "") for m in makers], serves, given, text)
        n = given.get("n")
        if op.rows == "expand" and isinstance(n, int):
            rows *= n
        self._regrouped[call.index] = rows
        self._from[call.index] = tuple(sources.values())
        groups = self._note(Made(call, self._opened, rows, tuple(makers), self._from[call.index], prompts))
        owner = None if op.owner in ("batch", "rl", "data", "user") and worker == op.owner else worker
        values = list(find(list(given.values())))
        scheduled = self.scheme.call(
            call.index,
            self._opened if self._inside else -1,
            op,
            owner,
            site(call),
            inputs=makers,
            handles=serves,
            arguments=given,
            cut=bool(values) and all(map(self._can_cut, values)),
            groups=groups,
        )
        if scheduled.rowwise or op.returns == "batch":
            self._cuttable.add(call.index)
        self.clock.issue(scheduled)
        return call

    def _can_cut(self, value: Value) -> bool:
        """Whether a value comes in chunks, or is a batch that can be cut into some, as a run decides it."""
        ref = value.ref
        if isinstance(ref, TField):
            return ref.call is None or ref.call in self._cuttable
        return isinstance(value, BatchValue) or (isinstance(ref, TNumber) and ref.calls <= self._cuttable)

    def count(self, rows: Rows, *, expanded: bool = True) -> int:
        """How many rows a term of the trace stands for; a filter is taken to keep all.

        Without ``expanded`` those that it had before a call made several of each.
        """
        kind, *rest = rows
        if kind == "draw":
            return self._sizes.get(rest[0], 0)
        if kind == "regroup":
            return self._regrouped.get(rest[0], 0)
        if kind == "concat":
            return sum(self.count(part, expanded=expanded) for part in rest)
        if kind == "expand" and len(rest) == 2 and isinstance(rest[1], int):
            return self.count(rest[0], expanded=expanded) * (rest[1] if expanded else 1)
        inner: Rows | int = rest[0] if rest else 0
        return 0 if isinstance(inner, int) else self.count(inner, expanded=expanded)

    def sources(self, rows: Rows) -> tuple[Any, ...]:
        """The sources behind a term of the trace."""
        kind, *rest = rows
        if kind == "draw":
            return (self._drawn[rest[0]],) if rest[0] in self._drawn else ()
        if kind == "regroup":
            return self._from.get(rest[0], ())
        inner: list[Rows | int] = rest if kind == "concat" else rest[:1]
        return tuple(source for part in inner if not isinstance(part, int) for source in self.sources(part))


_ROUNDS = 16  # of a loop on a number of rows within a step


def _computed(term: ast.expr, numbers: Mapping[str, float]) -> Any:
    """The number that a term stands for, such as ``gt(c12, 0)`` where ``c12`` is known; else None."""
    if isinstance(term, ast.Name):
        return numbers.get(term.id)
    if isinstance(term, ast.Call) and isinstance(term.func, ast.Name):
        operation, operands = PYTHON.get(term.func.id), [_computed(operand, numbers) for operand in term.args]
        with suppress(ArithmeticError):
            return operation(*operands) if operation and None not in operands else None
    with suppress(ValueError):
        return ast.literal_eval(term)
    return None
