"""Who does what the state machine says: calls and moves of weights, each in the thread of its pool."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from ...batch import Batch
from ...errors import FlowError, NotFinite, RankLost, ResumeError, RunError, cut
from ...graph.ops.op import Op
from ...graph.stand_ins.values import is_handle, replace_values
from ...schedule.events import Call as Scheduled
from ...schedule.events import (
    Command,
    Commit,
    Entered,
    Event,
    Finished,
    Freed,
    GoOn,
    Grouped,
    Issued,
    Publish,
    Stage,
    Start,
    Take,
)
from ...schedule.machine import Machine
from ...schedule.scheme import Scheme
from ..executor import CountedCall, Executor, Ready, SteppedCall
from ..storage.answers.external_answers import LeftUnanswered
from ..values.call import Call, NotKept, maker, outcome
from ..values.chunks import NOTHING, Cutter, can_cut, chunk_of, join_chunks
from ..values.remote_batch import RemoteBatch
from ..values.step_records import Hooks, Release, StepLog
from .begin_order import BeginOrder
from .exchanged_groups import ExchangedGroups, GroupCall, count_groups
from .jobs import CommandJob, GoOnJob, end_of
from .monitoring.releases import Releases
from .monitoring.row_ledger import RowLedger
from .monitoring.step_notes import StepNotes, site_of
from .pool_threads import Everywhere, Pools
from .step_rows import StepRows
from .weight_moves import WeightMoves

MOVE = 1 << 62  # stands for a move of weights among the numbers of calls
QUIET = 1.0  # seconds without an event after which engines that stand still in a replay are looked at
MOMENT = 0.001  # seconds from one look at rows that stand still to the next
NO_POOL = ""  # the name of the thread of calls that take no pool, unless the driver does them


class Skipped(Exception):
    """A call whose input failed: not run."""


class LeftOut(Skipped):
    """A call of a step that a replay does not do again, for which the world would have been asked; no failure."""


class Dispatcher:
    """Tells the machine what happens, and does what it answers.

    ``workers`` are those that train, ``servers`` the generating copies of those that have one of their own.
    ``failures`` are (number of the call, error); ``committed`` the steps whose commit nobody has looked at yet.
    """

    def __init__(
        self,
        workers: Mapping[str, Any],
        servers: Mapping[str, Any],
        scheme: Scheme,
        machine: Machine,
        *,
        executor: Executor,
        hooks: Hooks,
        eager: bool,
        ledger: RowLedger,
    ) -> None:
        self.workers, self.servers, self.scheme, self.machine = workers, servers, scheme, machine
        self.executor, self.hooks, self.eager = executor, hooks, eager
        self.step_log = StepLog()
        self._changed = threading.Condition()
        self.notes = StepNotes(scheme, self.step_log, self._changed, ledger)
        self._kept = StepRows(self.step_log, executor, hooks.sampled)
        self._moves = WeightMoves(executor, scheme.setup, workers, servers, self.notes)
        self.cutter = Cutter(scheme.setup.chunks)
        self.exchanged = ExchangedGroups()
        self.order = BeginOrder(scheme, executor)
        self.failures: list[tuple[int, BaseException]] = []
        self.committed: deque[int] = deque()
        home = {*scheme.home, NO_POOL} if scheme.home else ()  # ranks do all calls, also those without a pool
        self._pools = Pools(Everywhere() if eager else home, self._changed)
        self._driver = threading.current_thread()
        self._issued: dict[int, Call] = {}  # not done yet; threads take theirs out, so others go through a copy
        self._since: dict[int, float] = {}  # when what runs was begun; the same
        self._queued = 0  # what was handed to threads and is not begun
        self._resting: set[str] = set()  # pools whose rows stand still
        self._closing = False
        self._quiet_since = perf_counter()  # the last event
        self.events = 0  # so far
        self._beside: dict[tuple[int, int], int] = {}  # threads of calls that join an engine, by chunk
        self._free: dict[str, tuple[float, int]] = {}  # by thread: when its last call was through, and which it was
        self._releases = Releases(self._issued, servers)

    # -- what the session asks ------------------------------------------------------------------------------------

    def issue(self, call: Call, worker: Any) -> None:
        """Have a call run when the machine says so; in the eager runtime that is at once."""
        self._issued[call.index] = call
        call.issued = perf_counter()
        self.tell(Issued(self._scheduled(call, worker)))
        if self.eager:
            self.wait(lambda: call.done)

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once a condition holds; the driver's thread runs what is at home meanwhile."""
        self._pools.wait(done if not self.order.is_kept else lambda: done() or self._let_engines_go_on())

    def _let_engines_go_on(self) -> Literal[False]:
        """In a replay whose rows are longer than those of the run: have engines go on that wait for a start, where that
        start waits for their rows and nothing else runs, or was handed to a thread that has not come to it yet."""
        calls = [self._issued.get(number) for number in self.machine.running]
        sample = not self._queued and all(call is not None and call.streams for call in calls)
        if sample and perf_counter() - self._quiet_since > QUIET and self.order.stands_still():
            self.order.go_on()
        return False

    def settle(self) -> None:
        """Wait until nothing runs; publishes that are held for the next step stay where they are."""
        self.wait(lambda: self.machine.idle)

    def free(self) -> None:
        """In a replay: keep its order no longer, as the program issues no more."""
        if self.order.is_kept:
            with self._changed:
                self.order.free()
            self.tell(Freed())

    def close(self, wait: bool) -> None:
        """End the threads."""
        self._closing = True
        if self.order.is_kept:
            self._pools.close(wait=False)  # nothing more is begun
            with self._changed:
                self.order.free()
        self._pools.close(wait)

    def break_off(self, error: BaseException) -> None:
        """Have the driver's thread raise an error as soon as it waits."""
        self._pools.break_off(error)

    def runs_own_ops_alone(self) -> bool:
        """Whether something runs, and all of it are moves of weights and ops of flowrl's own."""
        with self._changed:
            calls = [self._issued.get(number) for number in list(self._since)]
            return bool(self._since) and all(call is None or _is_own(call) for call in calls)

    def waits(self) -> tuple[list[dict[str, Any]], float]:
        """Return what is not done, as :class:`flowrl.runtime.storage.wait_record.WaitingCall`, and for how long nothing
        has happened."""
        with self._changed:
            now = time.time()
            found = [
                {**node._asdict(), "since": self._since.get(node.id), "at": self._line(node.id)}
                for node in self.machine.unfinished()
            ]
            since = list(self._since.values())
            return found, max([perf_counter() - self._quiet_since, *(now - begun for begun in since)])

    def prompts_under_way(self) -> set[int]:
        """Return the prompts whose rows calls are at that are not done, or that were made and nobody has taken yet."""
        with self._changed:
            calls = list(self._issued.values())  # some may end meanwhile
            refs = [maker(value.ref) for call in calls for value in call.values]
            known = [ref.result.keys for ref in refs if isinstance(ref.result, (Batch, RemoteBatch))]
            return {key[0] for keys in (*known, *self.exchanged.keys()) for key in keys}

    def first_failure(self) -> BaseException | None:
        """Wait for what runs; the first failure in program order, which counts the others."""
        self.free()
        self.settle()
        failures = ((i, e) for i, e in self.failures if not isinstance(e, Skipped))
        failed = sorted(failures, key=_explains)
        self.failures.clear()
        if not failed:  # what they waited for was told before, and caught by the program
            return None
        first = failed[0][1]
        if len(failed) > 1:
            first.add_note(f"({len(failed) - 1} more calls of this step failed after it)")
        return first

    def tell(self, event: Event, freed: Sequence[str] = ()) -> None:
        """Hand an event to the machine. What it answers goes to the pools' threads; what has no pool is done here.

        ``freed``: the pools of what is over by this event.
        """
        here = deque(self._hand_out(event, freed))
        while here:
            job = here.popleft()
            if self.start(job):
                while not self.finish(job):
                    pass
            here += self._hand_out(end_of(job.command), job.pools)

    def _hand_out(self, event: Event, freed: Sequence[str]) -> list[CommandJob]:
        """Tell the machine, and give its commands to the threads of their pools. Returns those that need none.

        What fails here has lost commands of the machine, for which nobody is to wait.
        """
        try:
            return self._hand_out_all(event, freed)
        except BaseException as error:
            self.break_off(error)
            raise

    def _hand_out_all(self, event: Event, freed: Sequence[str]) -> list[CommandJob]:
        here: list[CommandJob] = []
        with self._changed:
            self._quiet_since = now = perf_counter()
            self.events += 1
            if isinstance(event, Finished):
                self._since.pop(event.id, None)
                self._beside.pop((event.id, event.chunk), None)
            for command in self.machine.handle(event):
                self.order.hand_out(command)
                if isinstance(command, Commit):
                    step = self.step_log.step(command.step)
                    step.begun, step.taken = self.order.take_notes()
                    self.committed.append(command.step)
                    continue
                if isinstance(command, Take):
                    self._take(command)
                    continue
                if isinstance(command, GoOn):
                    self._queued += 1
                    self._pools.put(self._thread((command.pool,)), GoOnJob(self, command))
                    continue
                assert isinstance(command, (Start, Stage, Publish)), command
                job = CommandJob(self, command, now, self._releases.find(event, command, freed))
                self._queued += 1
                thread = self._thread_beside(command) or self._thread(command.pools)
                if command.pools or (isinstance(command, Start) and not self._pools.is_home(thread)):
                    self._pools.put(thread, job)
                else:
                    here.append(job)
            self._releases.forget(event)
            self._changed.notify_all()
        return here

    def _line(self, number: int) -> str:
        """The line of a call in the script."""
        call = self._issued.get(number)
        return f"{Path(call.at.file).name}:{call.at.line}" if call is not None and call.at is not None else ""

    def _thread(self, pools: Sequence[str]) -> str:
        """Of the pools that a call takes, the one whose thread runs it: the driver's own if it is among them."""
        return next((p for p in pools if self._pools.is_home(p)), pools[0] if pools else NO_POOL)

    def _thread_beside(self, command: Command) -> str:
        """Return the name of a thread of its own for a call that asks an engine row by row, or a chunk of one: others
        of the kind are beside it, and publishes come in between. Empty for another command."""
        call = self._issued.get(command.id) if isinstance(command, Start) else None
        if call is None or not call.joins or not isinstance(command, Start):
            return ""
        key, taken = (command.id, command.chunk), set(self._beside.values())
        number = self._beside[key] = next(n for n in range(len(taken) + 1) if n not in taken)
        return f"{command.pools[0]}, beside {number}"

    def start(self, job: CommandJob) -> bool:
        """Start a call, or move weights. Returns whether there is something to wait for."""
        command = job.command
        assert not isinstance(command, (Commit, GoOn, Take)), command
        if not self.order.may_begin(command):
            job.waits_for_turn = True
            return True
        with self._changed:
            self._queued -= 1
            self._resting.update(command.rests if isinstance(command, Start) else ())
        self._since[command.id] = time.time()
        if isinstance(command, Start):
            job.call = self._issued.get(command.id)
            return job.call is not None and self._start_call(job, job.call, command)  # None: a chunk of it has failed
        assert isinstance(command, (Stage, Publish)), command
        start, moved = perf_counter(), 0
        try:
            moved = self._moves.move(command)
        except BaseException as error:
            self._fail(MOVE, error)
        with self._changed:
            self.order.begin(command)
        if isinstance(command, Publish) and command.worker in self.servers:
            told = self.executor.published(command.worker)
            self.notes.note_publish(command, moved, told, start, perf_counter(), due=job.due, after=job.after)
        return False

    def _start_call(self, job: CommandJob, call: Call, command: Start) -> bool:
        """Start one call, or a chunk of it, in the thread that this is called in."""
        job.started = perf_counter()
        try:
            if any(isinstance(error, RankLost) or number == MOVE for number, error in self.failures):
                raise Skipped(f"{call.title} was not run: what it needs is lost")
            if command.offload or command.onload:
                self._moves.make_room(call, command)
                job.started = perf_counter()
            worker = self._worker(call.op, call.worker)
            given = replace_values(call.arguments, lambda v: self._value(v.ref, call, command))
            arguments = {n: self._copy_to_ask(v.name) if is_handle(v) else v for n, v in given.items()}
            job.rows = next((a for a in arguments.values() if isinstance(a, (Batch, RemoteBatch))), None)
            empty = call.parts is not None and any(a is NOTHING for a in arguments.values())
            if call.op.owner != "data":
                given = {} if empty else arguments
                self.notes.note_start(call, command.chunk, worker, given, job.rows, command.versions)
            if call.groups:
                self._start_groups(job, call, worker, arguments)
                return True
            if call.op.updates == "weights":
                call.info = replace(call.info, recorded=self._recorded(call))
            job.pending = Ready(NOTHING) if empty else self.executor.start(call, command.chunk, worker, arguments)
            with self._changed:
                self.order.begin(command)
            if call.joins:
                self.tell(Entered(command.id))  # its rows come and go, whoever else is there
            job.stepped = job.pending if call.streams and isinstance(job.pending, SteppedCall) else None
        except BaseException as error:
            if isinstance(error, LeftOut):
                with self._changed:
                    self.order.begin(command)  # what comes after it does not wait for it
            self._break(call, error)
            return False
        return True

    def _recorded(self, call: Call) -> tuple[int, ...]:
        """Return the prompts of a call's step whose rows are written down, as far as they are there."""
        step = self.step_log.of(call)
        count = self.hooks.sampled(step.number)
        rows = step.rows
        return tuple(rows.keys[group[0]][0] for group in rows.groups()[:count]) if count and rows is not None else ()

    def _start_groups(self, job: CommandJob, call: Call, worker: Any, arguments: Mapping[str, Any]) -> None:
        """Start each prompt group of a call on its own."""
        rows = job.rows
        assert rows is not None, "a call has groups of rows"
        parts = [rows.take(group) for group in rows.groups()]
        with self._changed:
            self.exchanged.begin(call, parts)
        assert isinstance(job.command, Start), "a call is started"
        self.order.choose_ranks(job.command)
        job.groups = deque()
        for number, part in enumerate(parts):
            pending = self.executor.start(call, number, worker, {**arguments, call.op.batch_parameter: part})
            job.groups.append(GroupCall(number, part, pending))
        ranks = (rank for group in job.groups for rank in group.ranks)
        with self._changed:
            self.order.begin(job.command, tuple(ranks))

    def finish(self, job: CommandJob) -> bool:
        """Wait for a call that was started, and keep what it gives. Returns whether it is over: one whose rows leave
        the engine one by one goes on by a step."""
        if job.waits_for_turn:
            job.waits_for_turn = False
            return not self.start(job)
        call, command = job.call, job.command
        if job.groups is not None or job.stepped is not None:
            if not self._resting.isdisjoint(job.pools):
                return self._stand_still(job)
            self.order.begin_rows_again(job.pools)
        if job.groups is not None:
            return self._go_on_groups(job, job.groups)
        assert call is not None and isinstance(command, Start) and job.pending is not None, "only a call is waited for"
        thread, start = self._thread(command.pools), job.started
        if command.pools and not call.streams and not call.joins:
            free, last = self._free.get(thread, (start, -1))  # until then the pool was at the one before
            if free > start:
                start, job.due, job.after = free, free, Release("pool", last)
        try:
            if job.stepped is not None and not self._go_on(job, job.stepped):
                return False
            result = self._sampled(call, command.chunk, job.pending.result())
            end = perf_counter()
            self._free[thread] = end, call.index
            if result is not NOTHING and call.op.owner != "data":  # before it lets go of its inputs
                why: Any = {"due": job.due, "after": job.after, "pending": job.pending}
                self.notes.note_end(call, command.chunk, result, job.rows, start, end, **why)
                if isinstance(job.pending, CountedCall):
                    self.notes.note_rollout(call, job.pending.slots, job.pending.waits)
            self._keep(call, command.chunk, result)
        except BaseException as error:
            if isinstance(error, NotFinite):
                self.hooks.not_finite(call, job.rows)
            self._break(call, error)
            return True
        return True

    def _stand_still(self, job: CommandJob) -> bool:
        """Let a moment pass in which the rows of a call stand still; it is over where nobody waits for them."""
        if not self._closing:
            time.sleep(MOMENT)
            return False
        assert job.call is not None, "only a call has rows"
        self._break(job.call, Skipped(f"{job.call.title} was broken off"))
        return True

    def let_rows_go_on(self, command: GoOn) -> None:
        """Have the rows go on that stand still in a pool, with their engine back in its memory."""
        try:
            self._moves.make_room(self._issued.get(command.id), command)
        except BaseException as error:
            self._fail(MOVE, error)
        with self._changed:
            self._queued -= 1
            self._resting.discard(command.pool)

    def _expect_weights(self, job: CommandJob) -> None:
        """Raise Skipped for a call whose rows may stand still for weights that do not come."""
        if any(number == MOVE for number, _ in self.failures):
            assert job.call is not None, "only a call has rows"
            raise Skipped(f"{job.call.title} was broken off: a move of weights has failed")

    def _go_on(self, job: CommandJob, pending: SteppedCall) -> bool:
        """Have the engine of a call make a step; tell the machine once it has room for another call. Returns whether
        the call is over."""
        self._expect_weights(job)
        over = pending.step()
        if not over and not job.entered and pending.has_entered:
            assert isinstance(job.command, Start), "calls alone enter an engine"
            job.entered = True
            self.tell(Entered(job.command.id))
        return over

    def _go_on_groups(self, job: CommandJob, groups: deque[GroupCall]) -> bool:
        """Have the engine of a call make a step, and tell the machine of a group that is over by then. Returns whether
        all are."""
        call, each = job.call, groups[0]
        assert call is not None, "only a call has groups"
        groups.rotate(-1)
        made: Any = None
        try:
            self._expect_weights(job)
            if each.step():
                made = self._sampled(call, each.number, each.pending.result())
        except BaseException as error:
            made = self._note_failed(call, error)
        if made is not None:
            groups.remove(each)
            with self._changed:
                self.exchanged.finish(call, each.number, made)
            if not isinstance(made, BaseException):
                why: Any = {"due": job.due, "after": job.after, "pending": each.pending}
                self.notes.note_end(call, each.number, made, each.rows, job.started, perf_counter(), **why)
            self.tell(Grouped(call.index, each.number))
        if groups and not job.entered and all(group.has_entered for group in groups):
            job.entered = True
            self.tell(Entered(call.index))
        return not groups

    def _sampled(self, call: Call, part: int, result: Any) -> Any:
        """Return the rows that the program goes on with where a call has sampled some; other results as they are."""
        take = self.hooks.take_sampled
        samples = call.op.cost in ("generate", "external") and call.op.rows == "expand"
        if take is None or not samples or not isinstance(result, (Batch, RemoteBatch)):
            return result
        return take(call, part, self.scheme.nodes.get(site_of(call), call.title), result)

    def _take(self, command: Take) -> None:
        """Have a call give the groups that were taken for it."""
        call = self._issued.get(command.id)
        try:
            result = self.exchanged.take(command.groups)
            if call is not None:
                self._keep(call, 0, result)
        except BaseException as error:
            if call is not None:
                call.finish(None, error)
                self._issued.pop(call.index, None)

    def _note_failed(self, call: Call, error: BaseException) -> BaseException:
        """Keep the failure of a call for the driver; return it as the user meets it."""
        told = error if isinstance(error, Skipped) else _with_line(error, call)
        self._fail(call.index, told)
        return told

    def _break(self, call: Call, error: BaseException) -> None:
        if isinstance(error, LeftUnanswered):
            error = LeftOut(error.what)
        told = error if isinstance(error, Skipped) else _with_line(error, call)
        call.finish(None, call.error or told)
        self._issued.pop(call.index, None)
        for number in range(call.groups):  # other steps may wait for them
            with self._changed:
                self.exchanged.finish(call, number, told)
            self.tell(Grouped(call.index, number))
        if not isinstance(told, LeftOut):
            self._fail(call.index, told)

    def _fail(self, number: int, error: BaseException) -> None:
        """Keep a failure for the driver, which raises it; what stops a whole program stops the driver's thread now."""
        self.failures.append((number, error))
        if not isinstance(error, Exception) and threading.current_thread() is self._driver:
            raise error

    def _keep(self, call: Call, chunk: int, result: Any) -> None:
        """Keep a result; that of a chunk until all chunks are there."""
        if call.parts is not None:
            with self._changed:
                call.parts[chunk] = result
                if any(p is None for p in call.parts):
                    return
            result = join_chunks(call.parts)
        if call.op.external and isinstance(result, (Batch, RemoteBatch)):
            self.hooks.settle(call, len(result))
        self._kept.note(call, result)
        call.finish(result)
        self._issued.pop(call.index, None)

    def _value(self, ref: Any, call: Call, command: Start) -> Any:
        source = maker(ref)
        if source.error is not None:
            raise (LeftOut if isinstance(source.error, LeftOut) else Skipped)(
                f"{call.title} was not run: {source.title} failed"
            )
        if source.result is NotKept:
            raise ResumeError(
                f"{call.title} needs the result of {source.title} from before the checkpoint, which nothing held then.",
                fix="Resume with the script that the run was started with.",
            )
        if command.chunks > 1 and call.parts is not None:
            return chunk_of(ref, command.chunk, self.cutter, call.step)
        return outcome(ref)

    def _worker(self, op: Op, name: str | None) -> Any:
        """Return the copy of a worker that an op runs on."""
        if name is None:
            return None
        return self._copy_to_ask(name) if op.cost == "generate" else self.workers[name]

    def _copy_to_ask(self, name: str) -> Any:
        """Return the copy of a worker that generates; its only one where it has no other."""
        return self.servers.get(name, self.workers[name])

    def _scheduled(self, call: Call, worker: Any) -> Scheduled:
        """A call as the schedule sees it."""
        refs = [v.ref for v in call.values]
        cut = self.scheme.setup.chunks > 1 and bool(refs) and all(can_cut(r) for r in refs)
        setup = self.scheme.setup
        exchanges = setup.streams and setup.order == "window" and call.op.asks
        scheduled = self.scheme.call(
            call.index,
            -1 if call.outside else call.step,
            call.op,
            call.worker,
            site_of(call),
            inputs=dict.fromkeys(m.index for m in map(maker, refs) if not m.done),
            handles=call.handles,
            arguments=call.arguments if cut else {},
            cut=cut,
            groups=count_groups(call) if exchanges else 0,
        )
        call.joins = scheduled.joins
        call.streams = bool(scheduled.serves) and not (scheduled.whole or scheduled.joins)
        call.groups = scheduled.groups
        if scheduled.rowwise and not call.groups:
            call.parts = [None] * self.scheme.setup.chunks
        return scheduled


def _explains(failure: tuple[int, BaseException]) -> tuple[bool, bool, int]:
    """Where a failure stands among those of a step: a loss explains the others, and a publish those that waited for it.

    A loss is told best by the call that met it, as others meet a rank that was ended since.
    """
    number, error = failure
    lost = isinstance(error, RankLost)
    return not lost, number != MOVE and not lost, number


def _is_own(call: Call) -> bool:
    """Whether the op of a call is one of flowrl's, and calls no code of others that nobody counts."""
    return not call.op.external and str(getattr(call.op.fn, "__module__", "")).startswith("flowrl.")


def _with_line(error: BaseException, call: Call) -> BaseException:
    """The error as the user meets it: with the line of their program. Errors that say where they are stay."""
    if isinstance(error, FlowError):
        if error.at is None:
            error.at = call.at
        return error
    if not isinstance(error, Exception):
        return error
    failed = RunError(cut(f"{call.title} failed: {type(error).__name__}: {error}"), at=call.at)
    failed.__cause__ = error
    return failed
