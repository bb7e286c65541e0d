"""A program run for real: its calls become futures, its steps commit in order, its reads and touches are journalled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...batch import CallInfo, Column
from ...errors import ProgramError, ResumeError
from ...graph.ops.batch_ops import result_kind
from ...graph.ops.check_arguments import bad_call
from ...graph.ops.op import Op
from ...graph.script.site import call_lines, caller
from ...graph.stand_ins.current_session import nested_steps
from ...graph.stand_ins.scalars import ScalarValue
from ...graph.stand_ins.values import BatchValue, FieldValue, MetricsValue, Value, replace_values
from ...graph.tracing.log_names import Logged
from ...graph.tracing.trace_records import SourceLike
from ...lowering.lower import Execution
from ...schedule.events import Closed, Ended, Opened, Resumed
from ...schedule.machine import Machine
from ..executor import Executor
from ..storage.journal import Journal
from ..values.call import Call, Part, maker, outcome
from ..values.remote_batch import RemoteColumn
from ..values.step_records import Draws, Hooks, Interrupted, Point, ResumePoint, Step
from .dependencies import MERGE, fields_after, read_signature, shortest
from .dispatcher import Dispatcher
from .issued_calls import IssuedCalls, refuse_unopened
from .loop_heads import LoopHeads
from .monitoring.row_ledger import RowLedger, keys_of
from .monitoring.staleness import note_origins, refuse_stale
from .under_way import LeftOut, Skipped


class Running:
    """The session of one program: see :class:`flowrl.graph.stand_ins.current_session.Session`.

    The state machine of :mod:`flowrl.schedule` says what starts when; this does it. ``number`` is that of the program
    in its run. Its workers are open in ``executor``. ``place``: where the journal has the answers of a call, by its
    number, of a program that is run between the steps of another; nobody goes on from the middle of it.
    """

    def __init__(
        self,
        execution: Execution,
        number: int,
        seed: int,
        *,
        journal: Journal,
        executor: Executor,
        hooks: Hooks,
        resume: ResumePoint | None,
        same: str = "",
        lengths: frozenset[str] = frozenset(),
        place: Callable[[int], tuple[int, float]] | None = None,
    ) -> None:
        self.program, self.number, self.seed, self.executor = execution.program, number, seed, executor
        self.scheme, self.hooks, self.resume = execution.scheme, hooks, resume
        self.issued = IssuedCalls(execution.program, number, journal if place is None else None, resume)
        self._place, self._code = place, getattr(execution.fn, "__code__", None)
        self._workers = frozenset(execution.workers)
        self.heads = LoopHeads(execution.fn, self, self.issued, same=same, lengths=lengths)
        scheme = execution.scheme
        workers = {name: executor.workers[name] for name in execution.workers}
        servers = {name: executor.servers[name] for name in execution.servers}
        held = resume.held if resume is not None else ()
        self.machine = Machine(
            scheme.setup,
            committed=(resume.steps if resume is not None else 0) - bool(held),
            versions={w: (servers.get(w) or workers[w]).version for w in scheme.setup.followers},
            held=held,
        )
        self.ledger = RowLedger(self.program)
        if resume is not None and resume.ledger is not None:
            self.ledger.restore(resume.ledger, keys_of(resume.live.values()))
        eager = execution.runtime == "eager"
        self.dispatcher = Dispatcher(
            workers, servers, scheme, self.machine, executor=executor, hooks=hooks, eager=eager, ledger=self.ledger
        )
        self.step_log = self.dispatcher.step_log
        self._counts: dict[tuple[str, int], int] = {}
        self._current: Draws | None = None
        self._open_step: Step | None = None
        self._opened = 0  # steps so far
        self._looping = False  # inside the loop over steps
        self._recorded = 0
        self._loop_end: Point | None = None  # while nothing was asked of workers since then
        self._loops = 0  # so far
        known = resume if resume is not None else _START
        self._stopped = dict(known.stopped)  # after how many steps loops were stopped early, by their number
        self._evaluated = dict(known.evaluated)  # after how many calls each evaluation was run
        if held:
            self.dispatcher.tell(Resumed())

    # -- what a flow asks ---------------------------------------------------------------------------------------

    def steps(self, source: SourceLike, steps: int | None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch); the step before is committed by then."""
        if self._looping:
            raise nested_steps()
        draws = self.issued.use(source)
        draws.of_loop = True
        step, self._looping = 0, True
        self._loops += 1
        try:
            if (there := self.heads.begin(self._opened, steps)) is not None:
                step, counts, ended = there
                self._opened = self._recorded = counts.opened
                self.issued.reached()
                if ended:
                    return
            elif not self.issued.replaying:
                self.hooks.looks()
            while (steps is None or step < steps) and not self._stops(step):
                self._open()
                self._current = draws
                batch = self._draw(draws, None)
                if batch is None:
                    self._close(empty=True)
                    break
                yield step, batch
                step += 1
                self._close(head=step)
            else:
                if not self.issued.replaying:  # a loop of more steps would go on from here
                    self._loop_end = self._point(self._opened - 1, head=step)
            self.heads.end(step, self._opened, steps)
        finally:  # also where the program leaves the loop by itself
            self._looping = False

    def _stops(self, step: int) -> bool:
        """Whether the loop ends after so many steps although it was asked for more."""
        if self._open_step is not None:  # the program left the loop before it in the middle of a step
            self._close()
        loop = str(self._loops)
        if self.issued.replaying:  # as it did then
            stopped = self.resume is not None and self.resume.stopped.get(loop) == step
        else:
            self._wait_until_may_open(self._opened)
            stopped = self.hooks.enough(self._opened)
            self._stopped.pop(loop, None)  # one that is made longer goes on
        if stopped:
            self._stopped[loop] = step
        return stopped

    def more(self, count: int) -> Any:
        """``count`` further rows of the source of this step."""
        if self._current is None:
            raise ProgramError("flow.more was called outside of flow.steps.", at=caller())
        return self._drawn(self._current, count)

    def take(self, source: SourceLike, count: int | None) -> Any:
        """The next rows of another source."""
        return self._drawn(self.issued.used(source) or self.issued.use(source), count)

    def log(self, step: Any, values: list[Logged]) -> None:
        """Have values recorded when the step commits."""
        if self._open_step is not None:
            self._open_step.logs.append((step, values))
        elif not self.issued.replaying:
            self.step_log.outside.logs.append((step, values))

    def finish(self) -> bool:
        """The program has returned: wait for all of it. Returns whether there is a checkpoint from which it could be
        made longer. Raises ResumeError, before anything is recorded, where it did less than the run has done."""
        if self._open_step is not None:
            self._close()
        if self.resume is not None and self.issued.replaying:
            raise ResumeError(
                f"'{self.program}' ended after {self._opened} steps; the run has done {self.resume.steps}.",
                fix="Give it at least the steps that are done.",
            )
        if self._loop_end is not None:
            self._settle()
            self._evaluate(ended=True)
            self.hooks.checkpoint(self._loop_end)
        self.dispatcher.tell(Ended())
        self._settle()
        self._record_outside()
        self._evaluate(ended=True)
        return self._loop_end is not None

    def end_ledger(self) -> dict[str, Any]:
        """Decide of all rows, as the program holds none any more. Returns what run.json has of them."""
        self._settle_ledger()
        return {**self.ledger.to_json(), "lengths": self.ledger.lengths()}

    def waits(self) -> tuple[dict[str, Any], float]:
        """Return what the program waits for now, and for how long nothing has happened; asked by another thread."""
        calls, quiet = self.dispatcher.under_way.waits(self.machine)
        step = self._open_step.number if self._open_step is not None else None
        return {"program": self.program, "step": step, "calls": calls, "ranks": self.executor.unanswered()}, quiet

    @property
    def events(self) -> int:
        """How much has happened so far; asked by another thread."""
        return self.dispatcher.under_way.events

    def break_off(self, error: BaseException) -> None:
        """Have the program raise an error as soon as it waits; called by another thread."""
        self.dispatcher.break_off(error)

    def close(self, wait: bool = True) -> None:
        """End the threads; what runs comes to its end, unless nobody waits for it."""
        self.dispatcher.close(wait)

    # -- the session protocol -----------------------------------------------------------------------------------

    def field(self, value: Value, name: str) -> Any:
        if isinstance(value, MetricsValue):
            return ScalarValue(self, Part(value.ref, name))
        known = value.ref.fields is not None and name in value.ref.fields
        return FieldValue(self, Part(shortest(value.ref, frozenset((name,))) if known else value.ref, name))

    def read(self, value: Value, kind: type) -> Any:
        number, before = self.issued.read()
        if before is not None:
            if not self._looping:
                self.heads.note_read(number, before)
            return kind(before)
        call = maker(value.ref)
        self.dispatcher.wait(lambda: call.done)
        if isinstance(call.error, LeftOut):
            self._end_replay()
        if isinstance(call.error, Skipped):
            self._settle()
        found = outcome(value.ref)
        if isinstance(found, (Column, RemoteColumn)):
            raise ProgramError(
                f"a field with {len(found)} rows is used as one {kind.__name__}.",
                at=caller(),
                fix="Reduce it first: .mean(), .sum(), .max().",
            )
        plain = kind(found)
        self.issued.note_read(number, found)
        if not self._looping:
            self.heads.note_read(number, found)
        return plain

    def call(self, op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        into: Mapping[str, str] = kwargs.get("into") or {}
        given = {n: v for n, v in kwargs.items() if n != "into"} if "into" in kwargs else kwargs
        try:
            arguments = op.bind(args, given)
        except TypeError as error:
            raise bad_call(_title(op, worker), op.parameters.named, given, error, caller(), ProgramError) from None
        return self._call(op, worker, arguments, into)

    def _call(self, op: Op, worker: Any, arguments: Mapping[str, Any], into: Mapping[str, str]) -> Any:
        """Issue a call on as few calls before it as it needs, and give its value."""
        found = read_signature(op, worker, arguments)
        if found is None:
            call = self._make(op, worker, arguments, into)
            call.fields = fields_after(op, tuple(arguments.values()), None)
            return self._value(op, call, arguments)
        signature, main = found
        added = frozenset(into.get(n, n) for n in signature.adds) if into else frozenset(signature.adds)
        whole: Call = main.ref
        short = whole
        if op.rows in ("same", "apart") and op.batch_parameter in signature.reads:
            short = shortest(whole, frozenset(signature.reads[op.batch_parameter]))
        if short is not whole:
            narrow = BatchValue(self, short)
            arguments = replace_values(arguments, lambda v: narrow if v is main else v)
        call = self._make(op, worker, arguments, into, signature.reads)
        if op.returns == "batch":
            call.fields = short.fields | added if op.rows == "same" and short.fields is not None else None
            if op.rows == "same":
                call.base, call.adds = short, added
            else:
                call.fields = fields_after(op, (main,), added)
            if short is not whole and op.inherits:
                rest = {"batch": main, "made": BatchValue(self, call), "names": tuple(sorted(added))}
                made = self._make(MERGE, None, rest, {})
                made.base, made.adds = whole, added
                made.fields = whole.fields | added if whole.fields is not None else None
                return BatchValue(self, made)
        return self._value(op, call, arguments)

    def _make(
        self,
        op: Op,
        worker: Any,
        arguments: Mapping[str, Any],
        into: Mapping[str, str],
        reads: Mapping[str, Collection[str]] | None = None,
    ) -> Call:
        """Issue a call, and in the eager runtime run it."""
        call = self._issue(op, worker.name if worker else None, _title(op, worker), arguments, into)
        call.reads = reads
        note_origins(call, self.scheme)
        if not call.done:
            refuse_unopened(call, self._workers)
            refuse_stale(call, self.scheme)
            self.dispatcher.issue(call, worker)
        return call

    # -- inside ---------------------------------------------------------------------------------------------------

    def _issue(
        self, op: Op, name: str | None, title: str, arguments: Mapping[str, Any], into: Mapping[str, str]
    ) -> Call:
        step = self._now
        occurrence = self._counts[(title, step)] = self._counts.get((title, step), -1) + 1
        outside = self._open_step is None
        info = CallInfo(self.seed, self.program, step, title, occurrence, outside)
        call = Call(self.issued.calls, op, name, arguments, into, None, info, self.number)
        call.outside = outside
        if self._place is not None:
            call.place = self._place(call.index)
        self.issued.add(call, title)
        if not call.done and op.owner != "data":
            call.at, call.site = caller(), (call.title, call_lines(self._code))
            self._loop_end = None
        return call

    def _value(self, op: Op, call: Call, arguments: Mapping[str, Any]) -> Any:
        kind = result_kind(op, arguments) if op.returns == "raw" else op.returns
        made = {"batch": BatchValue, "metrics": MetricsValue, "scalar": ScalarValue, "field": FieldValue}.get(kind)
        return None if made is None else made(self, call)

    def _drawn(self, draws: Draws, count: int | None) -> Any:
        batch = self._draw(draws, count)
        if batch is None:
            raise ProgramError("the source has no rows left.", at=caller(), fix="Give it repeat=True, or take fewer.")
        return batch

    def _draw(self, draws: Draws, count: int | None) -> Any:
        """A batch of the next rows, made at once; None when a source that ends has ended."""
        rows = self.issued.draw(draws, count)
        if rows is None:
            return None
        self._loop_end = None
        call = self._issue(_DRAW, None, "data.draw", {}, {})
        if not call.done:
            tokenizer = self.executor.tokenizer(getattr(draws.source, "tokenizer", None))
            skipped = getattr(draws.source, "skipped", 0)  # a source of the user's own may not count
            batch = draws.source.to_batch(rows, self.issued.draws, tokenizer)
            step = self._open_step or self.step_log.outside
            step.skipped += getattr(draws.source, "skipped", 0) - skipped
            self.dispatcher.notes.note_draw(call, batch, admit=draws is self._current)
            call.finish(self.executor.put(batch))
            self.issued.draws += len(rows)
        call.fields = frozenset(draws.source.schema())
        return BatchValue(self, call)

    @property
    def _now(self) -> int:
        """The step that is open; between steps, the one to come."""
        return self._open_step.number if self._open_step is not None else self._opened

    def _open(self) -> None:
        if self._open_step is not None:  # the program left its loop before the step ended
            self._close()
        number = self._opened
        self._opened += 1
        self._loop_end = None
        if not self.issued.replays_step(number):
            self._wait_until_may_open(number)
            self._record_outside()
            self.dispatcher.tell(Opened(number))
        self._open_step = self.step_log.step(number)

    def _wait_until_may_open(self, number: int) -> None:
        """Return once few enough of the steps before are uncommitted, and have the others recorded."""
        self.dispatcher.wait(lambda: self.machine.may_open(number) or bool(self.dispatcher.under_way.failures))
        self._record()

    def _end_replay(self) -> None:
        """End the program in a step that is not done again, once those before it are recorded.

        That step is closed where those before it are not recorded without: nothing that is due behind it is to be run.
        """
        self._settle()
        if not self.hooks.stop() and self._open_step is not None:
            self._close()
            self._settle()
        if self.hooks.stop():
            raise Interrupted

    def _record_outside(self) -> None:
        """Have what was logged outside of steps recorded."""
        if self.step_log.outside.logs:
            self._settle()
            self.step_log.outside.number = self._opened
            self._commit(self.step_log.outside)
        self.step_log.outside = Step(self._opened)

    def _close(self, empty: bool = False, head: int | None = None) -> None:
        """Close the step that is open; ``head``: the loop has done so many steps, and asks for the next one."""
        step, self._open_step, self._current = self._open_step, None, None
        assert step is not None, "a step is closed after it was opened"
        for key in [k for k in self._counts if k[1] < step.number]:
            del self._counts[key]
        self.issued.part_from_bases()
        if self.issued.replays_step(step.number):
            self.step_log.steps.pop(step.number, None)
            self._recorded = step.number + 1
            return
        self.dispatcher.tell(Closed(step.number))
        if empty:  # the source had ended: nothing was done in it
            self.step_log.steps.pop(step.number, None)
            self._settle()
            return
        if self.scheme.setup.staleness == 0:
            self._settle()
        if self.dispatcher.order.is_kept and self.hooks.stop():
            raise Interrupted  # what is under way would go on beside other rows than then
        self._evaluate()
        if self.hooks.stop() or self.hooks.due(step.number):
            self.hooks.checkpoint(self._point(step.number, head=head))
            if self.hooks.stop():  # also where that came meanwhile
                raise Interrupted

    def _evaluate(self, *, ended: bool = False) -> None:
        """Have programs run that evaluate what was trained so far, where that is due and something was done since."""
        for name in self.hooks.evaluations(self._opened, ended):
            if self._evaluated.get(name) != self.issued.calls:
                self._settle()
                self._record(upto=self._opened - 1)
                self.hooks.evaluate(name, self._opened, self.issued.calls)
                self._evaluated[name] = self.issued.calls

    def _point(self, upto: int, head: int | None = None) -> Point:
        """The point of the program after a step, when all that runs is done and recorded."""
        self._settle()
        self._record(upto=upto)
        record, live = self.issued.snapshot(self._recorded, self.machine.held())
        if head is not None and (variables := self.heads.record(head, self._opened)) is not None:
            record["variables"] = variables
        elif head is not None and (text := self.heads.in_words()) is not None:
            self.hooks.not_kept(text)
        self._settle_ledger()
        record |= {"ledger": self.ledger.state(), "evaluated": dict(self._evaluated), "stopped": dict(self._stopped)}
        return Point(record, live, self.hooks.marks())

    def _record(self, upto: int = -1) -> None:
        """Have the steps that are done recorded, in order. Raises what has failed, after all that runs is done."""
        if self.dispatcher.under_way.failures and (failure := self.dispatcher.first_failure()) is not None:
            raise failure
        while self.dispatcher.committed:
            upto = max(upto, self.dispatcher.committed.popleft())
        for step in self.dispatcher.notes.take_late(self._recorded):
            self.hooks.note(step)
        while self._recorded <= upto and not self.hooks.replayed():
            step = self.step_log.steps.pop(self._recorded, None)
            self._recorded += 1
            self.dispatcher.runner.cutter.forget(self._recorded)
            if step is not None:
                self._commit(step)

    def _commit(self, step: Step) -> None:
        """Have a step recorded; what it logged and the last of its rows are made readable first."""
        readable = self.executor.get
        step.logs = [
            (said, [replace(v, value=_plain(v.value, readable)) for v in values]) for said, values in step.logs
        ]
        step.readable = readable
        self._settle_ledger()
        step.ledger = self.ledger.line(step.number)
        self.hooks.commit(step)

    def _settle_ledger(self) -> None:
        """Have the ledger decide of the rows that no value of the program holds any more."""
        with self.dispatcher.notes.lock:
            under_way = self.dispatcher.prompts_under_way()  # before results: a call that ends meanwhile is in one
            self.ledger.settle(keys_of(self.issued.results()), under_way)

    def _settle(self) -> None:
        """Wait until nothing runs, and record what is done by then."""
        self.dispatcher.settle()
        self._record()


def _title(op: Op, worker: Any) -> str:
    return f"{worker.name if worker else op.owner}.{op.name}"


def _plain(value: Any, readable: Callable[[Any], Any]) -> Any:
    """A logged value: a column that lies elsewhere is brought here."""
    if not isinstance(value, Value):
        return value
    found = outcome(value.ref)
    return readable(found) if isinstance(found, RemoteColumn) else value


_START = ResumePoint(0, 0, 0, "", {}, [], 0)
_DRAW = Op(name="draw", owner="data", fn=lambda: None, reads=None, adds="", returns="raw")
