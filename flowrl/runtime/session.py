"""A program run for real: its calls become futures, its steps commit in order, its reads and touches are journalled."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..batch import Batch, CallInfo, Column
from ..errors import FlowError, ProgramError, ResumeError, RunError
from ..graph.arithmetic import result_kind
from ..graph.op import Op
from ..graph.site import caller
from ..graph.values import BatchValue, FieldValue, MetricsValue, ScalarValue, Value, find, is_handle, replace_values
from ..schedule.ledger import Ledger
from .call import Call, NotKept, Part, outcome
from .executors import EXECUTORS
from .journal import Journal


class Interrupted(Exception):
    """The user asked to stop; a checkpoint was taken."""


class SourceLike(Protocol):
    """What a session needs of a data source."""

    def cursor(self) -> Any: ...
    def to_batch(self, rows: list[dict[str, Any]], first_uid: int, tokenizer: Any) -> Batch: ...


@dataclass
class Draws:
    """A source in use: its cursor, and how its rows become a batch."""

    source: Any
    cursor: Any
    made: int = 0  # draws so far
    kept: int = 0  # draws before the cut of a resumed run


@dataclass(frozen=True)
class Timing:
    """One executed call: ``Timing("actor.generate", 3, 12.01, 12.35)``, seconds of the session's clock."""

    title: str
    step: int
    start: float
    end: float


@dataclass
class Step:
    """What a step gathers until it commits."""

    number: int
    logs: list[tuple[Any, dict[str, Any]]] = field(default_factory=list[tuple[Any, dict[str, Any]]])
    timings: list[Timing] = field(default_factory=list[Timing])
    rows: Batch | None = None  # the last batch with responses, for the sample of trajectories
    tokens: int = 0
    responses: int = 0


@dataclass(frozen=True)
class Cut:
    """Where a resumed program goes on: everything issued before ``calls`` is answered, not run."""

    calls: int
    reads: int
    steps: int
    course: str
    live: Mapping[int, Any]
    cursors: list[dict[str, Any]]
    draws: int


@dataclass(frozen=True)
class Hooks:
    """What a session tells its run: a step to record, whether to stop after it, a checkpoint to take, a warning."""

    commit: Callable[[Step], None]
    checkpoint: Callable[[], None]
    due: Callable[[int], bool]
    stop: Callable[[], bool]
    warn: Callable[[str], None]
    tokenizer: Callable[[Any], Any]


class Running:
    """The session of one program: see :class:`flowrl.graph.session.Session`."""

    def __init__(
        self,
        *,
        program: str,
        number: int,
        seed: int,
        workers: Mapping[str, Any],
        pools: Mapping[str, str],
        runtime: str,
        journal: Journal,
        hooks: Hooks,
        cut: Cut | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.program, self.number, self.seed = program, number, seed
        self.workers, self.pools = workers, pools
        self.journal, self.hooks, self.cut, self.clock = journal, hooks, cut, clock
        models = (self.pools[n] for n, w in workers.items() if hasattr(w, "build"))
        home = next(models, next(iter(pools.values()), "main"))
        self.executor = EXECUTORS[runtime](self._run, home)
        self.ledger = Ledger()
        self.calls, self.reads, self.draws = 0, 0, 0
        self._course = hashlib.sha256()
        self._live: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self._pending: list[Call] = []
        self._counts: dict[tuple[str, int], int] = {}
        self._sources: list[Draws] = []
        self._current: Draws | None = None
        self._step = Step(0)
        self._in_step = False
        self._failures: list[Call] = []

    # -- what a flow asks ---------------------------------------------------------------------------------------

    def steps(self, source: SourceLike, steps: int | None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch); the step before is committed by then."""
        draws = self._use(source)
        step = 0
        while steps is None or step < steps:
            self._open()
            self._current = draws
            batch = self._draw(draws, None)
            if batch is None:
                self._close(empty=True)
                break
            yield step, batch
            self._close()
            step += 1

    def more(self, count: int) -> Any:
        """``count`` further rows of the source of this step."""
        if self._current is None:
            raise ProgramError("flow.more was called outside of flow.steps.", at=caller())
        return self._drawn(self._current, count)

    def take(self, source: SourceLike, count: int | None) -> Any:
        """The next rows of another source."""
        known = next((d for d in self._sources if d.source is source), None)
        return self._drawn(known or self._use(source), count)

    def log(self, step: Any, values: dict[str, Any]) -> None:
        """Have values recorded when the step commits."""
        self._step.logs.append((step, values))

    def finish(self) -> None:
        """The program has returned: wait for all of it."""
        if self._in_step:
            self._close()
        self._drain()
        if self.cut is not None and self.replaying:
            raise ResumeError(
                f"'{self.program}' ended after {self.ledger.committed} steps; the run has done {self.cut.steps}.",
                fix="Give it at least the steps that are done.",
            )
        if self._step.logs and not self.replaying:
            self.hooks.commit(self._step)
            self._step = Step(self.ledger.committed)

    def close(self, wait: bool = True) -> None:
        """End the threads; what is still queued is run or skipped first, unless nobody waits for it."""
        self.executor.close(wait)

    # -- the session protocol -----------------------------------------------------------------------------------

    def field(self, value: Value, name: str) -> Any:
        part = Part(value.ref, name)
        return ScalarValue(self, part) if isinstance(value, MetricsValue) else FieldValue(self, part)

    def read(self, value: Value, kind: type) -> Any:
        number = self.reads
        self.reads += 1
        if self.cut is not None and number < self.cut.reads:
            return kind(self.journal.reads[(self.number, number)])
        self.executor.settle(value.ref.call if isinstance(value.ref, Part) else value.ref)
        found = outcome(value.ref)
        if isinstance(found, Column):
            raise ProgramError(
                f"a field with {len(found)} rows is used as one {kind.__name__}.",
                at=caller(),
                fix="Reduce it first: .mean(), .sum(), .max().",
            )
        plain = kind(found)
        if isinstance(found, (int, float, bool)):
            self.journal.read(self.number, number, found)
        return plain

    def call(self, op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = worker.name if worker else None
        title = f"{name or op.owner}.{op.name}"
        call = self._issue(op, name, title, args, kwargs)
        if not call.done:
            self._pending.append(call)
            self.ledger.issued(call.index)
            self.executor.submit(call, self._places(call, args, kwargs))
        return self._value(op, call, args)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether what is issued now lies before the cut of a resumed run."""
        return self.cut is not None and self.calls < self.cut.calls

    def _issue(self, op: Op, name: str | None, title: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        index, step = self.calls, self.ledger.committed if not self._in_step else self._step.number
        occurrence = self._counts[(title, step)] = self._counts.get((title, step), -1) + 1
        self._course.update(title.encode())
        call = Call(index, op, name, args, kwargs, None, CallInfo(self.seed, self.program, step, title, occurrence))
        self.calls += 1
        if self.cut is not None and index < self.cut.calls:
            call.finish(self.cut.live.get(index, NotKept))
            if self.calls == self.cut.calls:
                self.draws = self.cut.draws
            if self.calls == self.cut.calls and self.course != self.cut.course:
                raise ResumeError(
                    f"program '{self.program}' took another course than the run that is continued.",
                    at=caller(),
                    fix="Resume with the script and the parameters that the run was started with.",
                )
        elif name is not None:
            call.at = caller()
        self._live[index] = call
        return call

    @property
    def course(self) -> str:
        """A digest of the titles of all calls so far."""
        return self._course.hexdigest()

    def _value(self, op: Op, call: Call, args: tuple[Any, ...]) -> Any:
        kind = result_kind(op, args) if op.returns == "raw" else op.returns
        made = {"batch": BatchValue, "metrics": MetricsValue, "scalar": ScalarValue, "field": FieldValue}.get(kind)
        return None if made is None else made(self, call)

    def _places(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """The pools that a call needs: its worker's, and those of handles in its arguments. A library op goes where its
        first input was made."""
        handles = [a for a in (*args, *kwargs.values()) if is_handle(a)]
        if call.worker is not None:
            names = [call.worker, *(h.name for h in handles)]
            return list(dict.fromkeys(self.pools[n] for n in names))
        for value in find((args, kwargs)):
            maker = value.ref.call if isinstance(value.ref, Part) else value.ref
            if maker.worker is not None:
                return [self.pools[maker.worker]]
        return [next(iter(self.pools.values()), "main")]

    def _run(self, call: Call) -> None:
        """Run one call; called by an executor, in its thread."""
        start = self.clock()
        try:
            worker = self.workers[call.worker] if call.worker is not None else None
            args, kwargs = replace_values((call.args, dict(call.kwargs)), lambda v: _available(v.ref, call))
            args = tuple(self._open_handle(a) for a in args)
            kwargs = {k: self._open_handle(v) for k, v in kwargs.items()}
            if call.op.external:
                result = self._external(call, worker, args, kwargs)
            else:
                result = call.op.apply(worker, args, kwargs, call.info)
        except BaseException as error:
            self._failures.append(call)
            call.finish(None, error if isinstance(error, _Skipped) else _told(error, call))
            if not isinstance(error, Exception):
                raise
            return
        end = self.clock()
        if call.worker is not None or call.op.owner != "batch":
            self._note(call, result, start, end)
        call.finish(result)

    def _open_handle(self, value: Any) -> Any:
        return self.workers[value.name] if is_handle(value) else value

    def _external(self, call: Call, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer from the journal, or run and journal: the world is touched once."""
        main = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)
        if main is None:
            return call.op.apply(worker, args, kwargs, call.info)
        inputs = main.digest()
        added = self.journal.kept(
            self.number,
            call.index,
            inputs,
            lambda: self.hooks.warn(f"{call.title}: its rows differ from those journalled; run again"),
        )
        if added is None:
            result = call.op.apply(worker, args, kwargs, call.info)
            fresh = [n for n in result.fields if n not in main.fields]
            self.journal.keep(self.number, call.index, inputs, result.select(*fresh).with_call(None))
            return result
        return main.take_keys(added.keys).with_columns(dict(added.columns))

    def _note(self, call: Call, result: Any, start: float, end: float) -> None:
        step = self._step
        step.timings.append(Timing(call.title, call.step, start, end))
        if isinstance(result, Batch) and "response_ids" in result.fields:
            if call.op.cost in ("generate", "external") and call.op.rows == "expand":
                step.tokens += int(result["response_ids"].values.shape[0])
                step.responses += len(result)
            step.rows = result

    def _use(self, source: SourceLike) -> Draws:
        cursor = source.cursor()
        draws = Draws(source, cursor)
        if self.cut is not None and len(self._sources) < len(self.cut.cursors):
            draws.kept = self.cut.cursors[len(self._sources)]["draws"]
            cursor.load_state(self.cut.cursors[len(self._sources)]["state"])
        self._sources.append(draws)
        return draws

    def _drawn(self, draws: Draws, count: int | None) -> Any:
        batch = self._draw(draws, count)
        if batch is None:
            raise ProgramError("the source has no rows left.", at=caller(), fix="Give it repeat=True, or take fewer.")
        return batch

    def _draw(self, draws: Draws, count: int | None) -> Any:
        """A batch of the next rows, made at once; None when a source that ends has ended."""
        rows: list[dict[str, Any]] = []
        if self.replaying:
            if draws.made >= draws.kept:
                return None
        else:
            rows = draws.cursor.draw(count)
            if not rows:
                return None
        draws.made += 1
        call = self._issue(_DRAW, None, "data.draw", (), {})
        if not call.done:
            tokenizer = self.hooks.tokenizer(getattr(draws.source, "tokenizer", None))
            call.finish(draws.source.to_batch(rows, self.draws, tokenizer))
            self.draws += len(rows)
        return BatchValue(self, call)

    def _open(self) -> None:
        if self._in_step:  # the program left its loop before the step ended
            self._close()
        assert self.ledger.may_open(self.ledger.committed), "a step is opened when those before it have committed"
        self._in_step = True
        self._step = Step(self.ledger.committed)
        self.ledger.open(self.ledger.committed)

    def _close(self, empty: bool = False) -> None:
        step, self._in_step, self._current = self._step, False, None
        self._drain()
        replayed = self.cut is not None and self.ledger.committed < self.cut.steps
        self.ledger.close(step.number)
        for key in [k for k in self._counts if k[1] < step.number]:
            del self._counts[key]
        self._step = Step(self.ledger.committed)
        if replayed or empty:
            return
        self.hooks.commit(step)
        stop = self.hooks.stop()
        if stop or self.hooks.due(step.number):
            self.hooks.checkpoint()
        if stop:
            raise Interrupted

    def _drain(self) -> None:
        """Wait for all calls issued; raise the first failure in program order, counting the others."""
        for call in self._pending:
            self.executor.settle(call)
            self.ledger.finished(call.index)
        failed = sorted((c for c in self._failures if not isinstance(c.error, _Skipped)), key=lambda c: c.index)
        self._pending.clear()
        self._failures.clear()
        if failed:
            first = failed[0].error
            assert first is not None
            if len(failed) > 1:
                first.add_note(f"({len(failed) - 1} more calls of this step failed after it)")
            raise first

    def snapshot(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Where the program is, as a JSON record, and the values that it still holds."""
        live = {
            i: c.result for i, c in sorted(self._live.items()) if c.done and c.error is None and c.result is not None
        }
        record = {
            "calls": self.calls,
            "reads": self.reads,
            "steps": self.ledger.committed,
            "draws": self.draws,
            "course": self.course,
            "cursors": [{"state": d.cursor.state(), "draws": d.made} for d in self._sources],
        }
        return record, {i: r for i, r in live.items() if isinstance(r, (Batch, Column, dict, int, float, bool, list))}


class _Skipped(Exception):
    """A call whose input failed: not run."""


_DRAW = Op(name="draw", owner="data", fn=lambda: None, reads=None, adds="", returns="raw")


def _available(ref: Any, call: Call) -> Any:
    maker = ref.call if isinstance(ref, Part) else ref
    maker.wait()
    if maker.error is not None:
        raise _Skipped(f"{call.title} was not run: {maker.title} failed")
    if maker.result is NotKept:
        raise ResumeError(
            f"{call.title} needs the result of {maker.title} from before the checkpoint, which nothing held then.",
            fix="Resume with the script that the run was started with.",
        )
    return outcome(ref)


def _told(error: BaseException, call: Call) -> BaseException:
    """The error as the user meets it: with the line of their program. Errors that say where they are stay."""
    if isinstance(error, FlowError):
        if error.at is None:
            error.at = call.at
        return error
    if not isinstance(error, Exception):
        return error
    told = RunError(f"{call.title} failed: {type(error).__name__}: {error}", at=call.at)
    told.__cause__ = error
    return told


__all__ = ["Cut", "Hooks", "Interrupted", "Running", "Step", "Timing"]
