"""A program run for real: its calls become futures, its steps commit in order, its reads and touches are journalled."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..batch import Batch, CallInfo, Column
from ..errors import FlowError, ProgramError, ResumeError, RunError
from ..graph.arithmetic import result_kind
from ..graph.op import Op
from ..graph.site import caller
from ..graph.values import BatchValue, FieldValue, MetricsValue, ScalarValue, Value, find, is_handle, replace_values
from ..schedule.events import Closed, Command, Commit, Ended, Event, Finished, Issued, Opened, Publish, Resumed, Stage, Start
from ..schedule.machine import Machine
from ..schedule.scheme import Scheme
from .call import Call, NotKept, Part, maker, outcome
from .executors import Everywhere, Pools
from .journal import Journal
from .narrow import MERGE, declared, fields_after, shortest
from .pieces import NOTHING, Cutter, can_cut, piece_of, together


class Interrupted(Exception):
    """The user asked to stop; a checkpoint was taken."""


class SourceLike(Protocol):
    """What a session needs of a data source."""

    def cursor(self) -> Any: ...
    def schema(self) -> Mapping[str, Any]: ...
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
    """One executed call, piece of one, or publish, in seconds of the session's clock:
    ``Timing("actor.generate", 3, "rollout", 12.01, 12.35, rows=512, tokens=40960)``."""

    node: str
    step: int
    pool: str
    start: float
    end: float
    rows: int = 0
    tokens: int = 0


@dataclass
class Step:
    """What a step gathers until it commits."""

    number: int
    logs: list[tuple[Any, dict[str, Any]]] = field(default_factory=list[tuple[Any, dict[str, Any]]])
    timings: list[Timing] = field(default_factory=list[Timing])
    rows: Batch | None = None  # the last batch with responses, for the sample of trajectories
    last: int = -1  # the call that gave it
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
    held: tuple[str, ...] = ()  # workers whose last publish was waiting for the next step


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
    """The session of one program: see :class:`flowrl.graph.session.Session`.

    The state machine of :mod:`flowrl.schedule` says what starts when; this does it. ``workers`` are those that train,
    and ``servers`` the generating copies of those that have one of their own.
    """

    def __init__(
        self,
        *,
        program: str,
        number: int,
        seed: int,
        workers: Mapping[str, Any],
        servers: Mapping[str, Any],
        scheme: Scheme,
        runtime: str,
        journal: Journal,
        hooks: Hooks,
        cut: Cut | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.program, self.number, self.seed = program, number, seed
        self.workers, self.servers, self.scheme = workers, servers, scheme
        self.journal, self.hooks, self.cut, self.clock = journal, hooks, cut, clock
        self.eager = runtime == "eager"
        self._changed = threading.Condition()
        self._pools = Pools(Everywhere() if self.eager else self._home(), self._changed)
        held = cut.held if cut is not None else ()
        begun = cut.steps if cut is not None else 0
        self.machine = Machine(
            scheme.setup,
            committed=begun - bool(held),
            versions={w: (servers.get(w) or workers[w]).version for w in scheme.setup.followers},
            held=held,
        )
        self._cutter = Cutter(scheme.setup.pieces)
        self.calls, self.reads, self.draws = 0, 0, 0
        self._course = hashlib.sha256()
        self._live: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self._issued: dict[int, Call] = {}  # not done yet
        self._staged: dict[tuple[str, int], Any] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._sources: list[Draws] = []
        self._current: Draws | None = None
        self._steps: dict[int, Step] = {}  # not recorded yet
        self._open_step: Step | None = None
        self._outside = Step(0)  # what is done between steps and after them
        self._opened = 0  # steps so far
        self._recorded = 0
        self._committed: deque[int] = deque()
        self._failures: list[tuple[int, BaseException]] = []
        if held:
            self._tell(Resumed())

    def _home(self) -> frozenset[str]:
        """The pools that the driver's thread serves: that of the first model."""
        models = (self.scheme.train[n] for n, w in self.workers.items() if hasattr(w, "build"))
        return frozenset((next(models, next(iter(self.scheme.setup.pools), "main")),))

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
        if self._open_step is not None:
            self._open_step.logs.append((step, values))
        elif not self.replaying:
            self._outside.logs.append((step, values))

    def finish(self) -> None:
        """The program has returned: wait for all of it."""
        if self._open_step is not None:
            self._close()
        self._tell(Ended())
        self._settle()
        if self.cut is not None and self.replaying:
            raise ResumeError(
                f"'{self.program}' ended after {self._opened} steps; the run has done {self.cut.steps}.",
                fix="Give it at least the steps that are done.",
            )
        self._record_outside()

    def close(self, wait: bool = True) -> None:
        """End the threads; what runs comes to its end, unless nobody waits for it."""
        self._pools.close(wait)

    # -- the session protocol -----------------------------------------------------------------------------------

    def field(self, value: Value, name: str) -> Any:
        if isinstance(value, MetricsValue):
            return ScalarValue(self, Part(value.ref, name))
        known = value.ref.fields is not None and name in value.ref.fields
        return FieldValue(self, Part(shortest(value.ref, frozenset((name,))) if known else value.ref, name))

    def read(self, value: Value, kind: type) -> Any:
        number = self.reads
        self.reads += 1
        if self.cut is not None and number < self.cut.reads:
            return kind(self.journal.reads[(self.number, number)])
        call = maker(value.ref)
        self._pools.wait(lambda: call.done)
        if isinstance(call.error, _Skipped):
            self._settle()
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
        found = declared(op, worker, args, kwargs)
        if found is None:
            call = self._make(op, worker, args, kwargs)
            call.fields = fields_after(op, args, None)
            return self._value(op, call, args)
        signature, main = found
        into: Mapping[str, str] = kwargs.get("into") or {}
        added = frozenset(into.get(n, n) for n in signature.adds)
        whole: Call = main.ref
        short = whole
        if op.rows == "same" and op.batch_parameter in signature.reads:
            short = shortest(whole, frozenset(signature.reads[op.batch_parameter]))
        if short is not whole:
            narrow = BatchValue(self, short)
            args, kwargs = replace_values((args, dict(kwargs)), lambda v: narrow if v is main else v)
        call = self._make(op, worker, args, kwargs)
        if op.returns == "batch":
            call.fields = short.fields | added if op.rows == "same" and short.fields is not None else None
            if op.rows == "same":
                call.base, call.adds = short, added
            else:
                call.fields = fields_after(op, (main,), added)
            if short is not whole:
                made = self._make(MERGE, None, (main, BatchValue(self, call), tuple(sorted(added))), {})
                made.base, made.adds = whole, added
                made.fields = whole.fields | added if whole.fields is not None else None
                return BatchValue(self, made)
        return self._value(op, call, args)

    def _make(self, op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Issue a call, and in the eager runtime run it."""
        name = worker.name if worker else None
        call = self._issue(op, name, f"{name or op.owner}.{op.name}", args, kwargs)
        if not call.done:
            self._issued[call.index] = call
            self._tell(Issued(self._scheduled(call, worker)))
            if self.eager:
                self._pools.wait(lambda: call.done)
        return call

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether what is issued now lies before the cut of a resumed run."""
        return self.cut is not None and self.calls < self.cut.calls

    def _issue(self, op: Op, name: str | None, title: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        index, step = self.calls, self._now
        occurrence = self._counts[(title, step)] = self._counts.get((title, step), -1) + 1
        self._course.update(title.encode())
        call = Call(index, op, name, args, kwargs, None, CallInfo(self.seed, self.program, step, title, occurrence))
        call.outside = self._open_step is None
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

    def _scheduled(self, call: Call, worker: Any) -> Any:
        """A call as the schedule sees it."""
        refs = [v.ref for v in find((call.args, call.kwargs))]
        handles = [a.name for a in (*call.args, *call.kwargs.values()) if is_handle(a)]
        arguments: Mapping[str, Any] = {}
        cut = self.scheme.setup.pieces > 1 and bool(refs) and all(can_cut(r) for r in refs)
        if cut:
            arguments = call.op.bind(worker, call.args, {k: v for k, v in call.kwargs.items() if k != "into"})
        made = self.scheme.call(
            call.index,
            -1 if call.outside else call.step,
            call.op,
            call.worker,
            (call.title, call.at.file, call.at.line) if call.at is not None else (call.title, "", 0),
            inputs=dict.fromkeys(m.index for m in map(maker, refs) if not m.done),
            handles=handles,
            init=worker.arguments if worker else {},
            arguments=arguments,
            cut=cut,
        )
        if made.rowwise:
            call.parts = [None] * self.scheme.setup.pieces
        return made

    # -- doing what the machine says ------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Hand an event to the machine. What it answers goes to the pools' threads; what has no pool is done here."""
        here = deque(self._handed(event))
        while here:
            command = here.popleft()
            self._do(command)
            here += self._handed(_done(command))

    def _handed(self, event: Event) -> list[Command]:
        """Tell the machine, and hand its commands on. Returns those that need no pool."""
        here: list[Command] = []
        with self._changed:
            for command in self.machine.handle(event):
                if isinstance(command, Commit):
                    self._committed.append(command.step)
                    continue
                assert isinstance(command, (Start, Stage, Publish)), command
                if command.pools:
                    self._pools.put(self._thread(command.pools), lambda command=command: self._work(command))
                else:
                    here.append(command)
            self._changed.notify_all()
        return here

    def _thread(self, pools: Sequence[str]) -> str:
        """Of the pools that a call takes, the one whose thread runs it: the driver's own if it is among them."""
        return next((p for p in pools if self._pools.is_home(p)), pools[0])

    def _work(self, command: Command) -> None:
        try:
            self._do(command)
        finally:
            self._tell(_done(command))

    def _do(self, command: Command) -> None:
        if isinstance(command, Start):
            if (call := self._issued.get(command.id)) is not None:  # None: another piece of it has failed
                self._run(call, command)
            return
        assert isinstance(command, (Stage, Publish)), command
        start = self.clock()
        try:
            self._move(command)
        except BaseException as error:
            self._failures.append((self.calls, error))
            if not isinstance(error, Exception):
                raise
        if isinstance(command, Publish) and command.worker in self.servers:
            timing = Timing(f"{command.worker}.publish", command.step, command.pools[0], start, self.clock())
            self._steps.get(command.step, self._outside).timings.append(timing)

    def _move(self, command: Stage | Publish) -> None:
        """Set weights aside, or install them where they generate."""
        worker, key = self.workers[command.worker], (command.worker, command.version)
        if isinstance(command, Stage):
            self._staged[key] = worker.stage()
        elif command.worker not in self.servers:
            worker.published(command.version)
        else:
            worker.published(command.version)
            self.servers[command.worker].install(self._staged.pop(key), command.version)

    def _run(self, call: Call, command: Start) -> None:
        """Run one call, or a piece of it, in the thread that this is called in."""
        start = self.clock()
        result: Any = None
        try:
            worker = self._worker(call.op, call.worker)
            given = replace_values((call.args, dict(call.kwargs)), lambda v: self._given(v.ref, call, command))
            args = tuple(self._open_handle(a) for a in given[0])
            kwargs = {k: self._open_handle(v) for k, v in given[1].items()}
            if call.parts is not None and any(a is NOTHING for a in (*args, *kwargs.values())):
                result = NOTHING
            elif call.op.external:
                result = self._external(call, command, worker, args, kwargs)
            else:
                result = call.op.apply(worker, args, kwargs, call.info)
        except BaseException as error:
            told = error if isinstance(error, _Skipped) else _told(error, call)
            self._failures.append((call.index, told))
            call.finish(None, call.error or told)
            self._issued.pop(call.index, None)
            if not isinstance(error, Exception):
                raise
            return
        if result is not NOTHING and (call.worker is not None or call.op.owner not in ("batch", "data")):
            batch = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)
            self._note(call, result, batch, start, self.clock())
        self._kept(call, command, result)

    def _kept(self, call: Call, command: Start, result: Any) -> None:
        """Keep a result; that of a piece until all pieces are there."""
        if call.parts is not None:
            with self._changed:
                call.parts[command.piece] = result
                if any(p is None for p in call.parts):
                    return
            result = together(call.parts)
        if isinstance(result, Batch) and "response_ids" in result.fields:
            step = self._outside if call.outside else self._step_of(call.step)
            if call.index > step.last:
                step.rows, step.last = result, call.index
        call.finish(result)
        self._issued.pop(call.index, None)

    def _given(self, ref: Any, call: Call, command: Start) -> Any:
        made = maker(ref)
        if made.error is not None:
            raise _Skipped(f"{call.title} was not run: {made.title} failed")
        if made.result is NotKept:
            raise ResumeError(
                f"{call.title} needs the result of {made.title} from before the checkpoint, which nothing held then.",
                fix="Resume with the script that the run was started with.",
            )
        if command.pieces > 1 and call.parts is not None:
            return piece_of(ref, command.piece, self._cutter, call.step)
        return outcome(ref)

    def _worker(self, op: Op, name: str | None) -> Any:
        """The copy of a worker that an op runs on."""
        if name is None:
            return None
        return self.servers.get(name, self.workers[name]) if op.cost == "generate" else self.workers[name]

    def _open_handle(self, value: Any) -> Any:
        return self.servers.get(value.name, self.workers[value.name]) if is_handle(value) else value

    def _external(self, call: Call, command: Start, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer from the journal, or run and journal: the world is touched once."""
        main = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)
        if main is None:
            return call.op.apply(worker, args, kwargs, call.info)
        inputs = main.digest()
        added = self.journal.kept(
            self.number,
            call.index,
            command.piece,
            inputs,
            lambda: self.hooks.warn(f"{call.title}: its rows differ from those journalled; run again"),
        )
        if added is None:
            result = call.op.apply(worker, args, kwargs, call.info)
            fresh = [n for n in result.fields if n not in main.fields]
            self.journal.keep(self.number, call.index, command.piece, inputs, result.select(*fresh).with_call(None))
            return result
        return main.take_keys(added.keys).with_columns(dict(added.columns))

    def _note(self, call: Call, result: Any, given: Batch | None, start: float, end: float) -> None:
        rows = result if isinstance(result, Batch) else given
        length = int(rows["tokens"].values.shape[0]) if rows is not None and "tokens" in rows.fields else 0
        pools = self.scheme.pools(call.op, call.worker)
        with self._changed:
            step = self._outside if call.outside else self._step_of(call.step)
            pool = pools[0] if pools else ""
            size = 0 if rows is None else len(rows)
            at = call.at
            node = self.scheme.nodes.get((call.title, at.file, at.line), call.title) if at else call.title
            step.timings.append(Timing(node, call.step, pool, start, end, size, length))
            made = isinstance(result, Batch) and "response_ids" in result.fields
            if made and call.op.cost in ("generate", "external") and call.op.rows == "expand":
                step.tokens += int(result["response_ids"].values.shape[0])
                step.responses += len(result)

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
        call.fields = frozenset(draws.source.schema())
        return BatchValue(self, call)

    @property
    def _now(self) -> int:
        """The step that is open; between steps, the one to come."""
        return self._open_step.number if self._open_step is not None else self._opened

    def _step_of(self, number: int) -> Step:
        return self._steps.setdefault(number, Step(number))

    def _open(self) -> None:
        if self._open_step is not None:  # the program left its loop before the step ended
            self._close()
        number = self._opened
        self._opened += 1
        if self.cut is None or number >= self.cut.steps:
            self._pools.wait(lambda: self.machine.may_open(number) or bool(self._failures))
            self._record()
            self._record_outside()
            self._tell(Opened(number))
        self._open_step = self._step_of(number)

    def _record_outside(self) -> None:
        """Have what was logged outside of steps recorded."""
        if self._outside.logs:
            self._settle()
            self._outside.number = self._opened
            self.hooks.commit(self._outside)
        self._outside = Step(self._opened)

    def _close(self, empty: bool = False) -> None:
        step, self._open_step, self._current = self._open_step, None, None
        assert step is not None, "a step is closed after it was opened"
        for key in [k for k in self._counts if k[1] < step.number]:
            del self._counts[key]
        for call in self._live.values():  # a value that goes on into a later step stands for itself alone
            call.base = None
        if self.cut is not None and step.number < self.cut.steps:
            self._steps.pop(step.number, None)
            self._recorded = step.number + 1
            return
        self._tell(Closed(step.number))
        if empty:  # the source had ended: nothing was done in it
            self._steps.pop(step.number, None)
            self._settle()
            return
        if self.scheme.setup.staleness == 0:
            self._settle()
        stop = self.hooks.stop()
        if stop or self.hooks.due(step.number):
            self._settle()
            self._record(upto=step.number)
            self.hooks.checkpoint()
        if stop:
            raise Interrupted

    def _record(self, upto: int = -1) -> None:
        """Have the steps that are done recorded, in order. Raises what has failed, after all that runs is done."""
        if self._failures:
            self._fail()
        while self._committed:
            upto = max(upto, self._committed.popleft())
        while self._recorded <= upto:
            step = self._steps.pop(self._recorded, None)
            self._recorded += 1
            self._cutter.forget(self._recorded)
            if step is not None:
                self.hooks.commit(step)

    def _settle(self) -> None:
        """Wait until nothing runs; publishes that are held for the next step stay where they are."""
        self._pools.wait(lambda: self.machine.idle)
        self._record()

    def _fail(self) -> None:
        """Wait for what runs, then raise the first failure in program order, counting the others."""
        self._pools.wait(lambda: self.machine.idle)
        failed = sorted(((i, e) for i, e in self._failures if not isinstance(e, _Skipped)), key=lambda f: f[0])
        self._failures.clear()
        if not failed:  # what they waited for was told before, and caught by the program
            return
        first = failed[0][1]
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
            "steps": self._recorded,
            "draws": self.draws,
            "course": self.course,
            "cursors": [{"state": d.cursor.state(), "draws": d.made} for d in self._sources],
            "held": sorted(self.machine.held()),
        }
        return record, {i: r for i, r in live.items() if isinstance(r, (Batch, Column, dict, int, float, bool, list))}


class _Skipped(Exception):
    """A call whose input failed: not run."""


_DRAW = Op(name="draw", owner="data", fn=lambda: None, reads=None, adds="", returns="raw")


def _done(command: Command) -> Event:
    assert isinstance(command, (Start, Stage, Publish)), command
    return Finished(command.id, command.piece if isinstance(command, Start) else 0)


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
