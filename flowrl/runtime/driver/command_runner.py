"""How a command of the machine is done, in the thread of its pool: a call is started and waited for, weights move."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from ...batch import Batch
from ...errors import NotFinite, RankLost, ResumeError
from ...graph.ops.op import Op
from ...graph.stand_ins.values import is_handle, replace_values
from ...schedule.events import Commit, Entered, GoOn, Grouped, Publish, Stage, Start, Take
from ...schedule.scheme import Scheme
from ..executor import CountedCall, Executor, Ready, SteppedCall
from ..storage.answers.external_answers import LeftUnanswered
from ..values.call import Call, NotKept, maker, outcome
from ..values.chunks import NOTHING, Cutter, chunk_of, join_chunks
from ..values.remote_batch import RemoteBatch
from ..values.step_records import Hooks, Release, StepLog
from .begin_order import BeginOrder
from .exchanged_groups import ExchangedGroups, GroupCall
from .jobs import CommandJob, Tells
from .monitoring.step_notes import StepNotes
from .step_rows import StepRows
from .under_way import MOVE, LeftOut, Skipped, UnderWay, with_line
from .weight_moves import WeightMoves

MOMENT = 0.001  # seconds from one look at rows that stand still to the next


class CommandRunner:
    """Does what commands say, each in the thread that it is called in, and keeps what calls give.

    ``tell`` has the machine told of what happens meanwhile.
    """

    def __init__(
        self,
        workers: Mapping[str, Any],
        servers: Mapping[str, Any],
        scheme: Scheme,
        *,
        executor: Executor,
        hooks: Hooks,
        step_log: StepLog,
        notes: StepNotes,
        order: BeginOrder,
        under_way: UnderWay,
        tell: Tells,
    ) -> None:
        self.workers, self.servers, self.scheme = workers, servers, scheme
        self.executor, self.hooks, self.step_log, self.notes = executor, hooks, step_log, notes
        self.order, self.under_way, self.tell = order, under_way, tell
        self.cutter = Cutter(scheme.setup.chunks)
        self.exchanged = ExchangedGroups()
        self._kept = StepRows(step_log, executor, hooks.sampled)
        self._moves = WeightMoves(executor, scheme.setup, workers, servers, notes)
        self._free: dict[str, tuple[float, int]] = {}  # by thread: when its last call was through, and which it was

    def start(self, job: CommandJob) -> bool:
        """Start a call, or move weights. Returns whether there is something to wait for."""
        command = job.command
        assert not isinstance(command, (Commit, GoOn, Take)), command
        if not self.order.may_begin(command):
            job.waits_for_turn = True
            return True
        with self.under_way.changed:
            self.under_way.queued -= 1
            self.under_way.resting.update(command.rests if isinstance(command, Start) else ())
        self.under_way.since[command.id] = time.time()
        if isinstance(command, Start):
            job.call = self.under_way.calls.get(command.id)
            return job.call is not None and self._start_call(job, job.call, command)  # None: a chunk of it has failed
        assert isinstance(command, (Stage, Publish)), command
        start, moved = perf_counter(), 0
        try:
            moved = self._moves.move(command)
        except BaseException as error:
            self.under_way.fail(MOVE, error)
        with self.under_way.changed:
            self.order.begin(command)
        if isinstance(command, Publish) and command.worker in self.servers:
            told = self.executor.published(command.worker)
            self.notes.note_publish(command, moved, told, start, perf_counter(), due=job.due, after=job.after)
        return False

    def _start_call(self, job: CommandJob, call: Call, command: Start) -> bool:
        """Start one call, or a chunk of it, in the thread that this is called in."""
        job.started = perf_counter()
        try:
            if any(isinstance(error, RankLost) or number == MOVE for number, error in self.under_way.failures):
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
            with self.under_way.changed:
                self.order.begin(command)
            if call.joins:
                self.tell(Entered(command.id))  # its rows come and go, whoever else is there
            job.stepped = job.pending if call.streams and isinstance(job.pending, SteppedCall) else None
        except BaseException as error:
            if isinstance(error, LeftOut):
                with self.under_way.changed:
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
        with self.under_way.changed:
            self.exchanged.begin(call, parts)
        assert isinstance(job.command, Start), "a call is started"
        self.order.choose_ranks(job.command)
        job.groups = deque()
        for number, part in enumerate(parts):
            pending = self.executor.start(call, number, worker, {**arguments, call.op.batch_parameter: part})
            job.groups.append(GroupCall(number, part, pending))
        ranks = (rank for group in job.groups for rank in group.ranks)
        with self.under_way.changed:
            self.order.begin(job.command, tuple(ranks))

    def finish(self, job: CommandJob) -> bool:
        """Wait for a call that was started, and keep what it gives. Returns whether it is over: one whose rows leave
        the engine one by one goes on by a step."""
        if job.waits_for_turn:
            job.waits_for_turn = False
            return not self.start(job)
        call, command = job.call, job.command
        if job.groups is not None or job.stepped is not None:
            if not self.under_way.resting.isdisjoint(job.pools):
                return self._stand_still(job)
            self.order.begin_rows_again(job.pools)
        if job.groups is not None:
            return self._go_on_groups(job, job.groups)
        assert call is not None and isinstance(command, Start) and job.pending is not None, "only a call is waited for"
        thread, start = job.thread, job.started
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
        if not self.under_way.closing:
            time.sleep(MOMENT)
            return False
        assert job.call is not None, "only a call has rows"
        self._break(job.call, Skipped(f"{job.call.title} was broken off"))
        return True

    def let_rows_go_on(self, command: GoOn) -> None:
        """Have the rows go on that stand still in a pool, with their engine back in its memory."""
        try:
            self._moves.make_room(self.under_way.calls.get(command.id), command)
        except BaseException as error:
            self.under_way.fail(MOVE, error)
        with self.under_way.changed:
            self.under_way.queued -= 1
            self.under_way.resting.discard(command.pool)

    def _expect_weights(self, job: CommandJob) -> None:
        """Raise Skipped for a call whose rows may stand still for weights that do not come."""
        if any(number == MOVE for number, _ in self.under_way.failures):
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
            with self.under_way.changed:
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
        return take(call, part, self.scheme.nodes.get(call.site, call.title), result)

    def take(self, command: Take) -> None:
        """Have a call give the groups that were taken for it."""
        call = self.under_way.calls.get(command.id)
        try:
            result = self.exchanged.take(command.groups)
            if call is not None:
                self._keep(call, 0, result)
        except BaseException as error:
            if call is not None:
                call.finish(None, error)
                self.under_way.calls.pop(call.index, None)

    def _note_failed(self, call: Call, error: BaseException) -> BaseException:
        """Keep the failure of a call for the driver; return it as the user meets it."""
        told = error if isinstance(error, Skipped) else with_line(error, call)
        self.under_way.fail(call.index, told)
        return told

    def _break(self, call: Call, error: BaseException) -> None:
        if isinstance(error, LeftUnanswered):
            error = LeftOut(error.what)
        told = error if isinstance(error, Skipped) else with_line(error, call)
        call.finish(None, call.error or told)
        self.under_way.calls.pop(call.index, None)
        for number in range(call.groups):  # other steps may wait for them
            with self.under_way.changed:
                self.exchanged.finish(call, number, told)
            self.tell(Grouped(call.index, number))
        if not isinstance(told, LeftOut):
            self.under_way.fail(call.index, told)

    def _keep(self, call: Call, chunk: int, result: Any) -> None:
        """Keep a result; that of a chunk until all chunks are there."""
        if call.parts is not None:
            with self.under_way.changed:
                call.parts[chunk] = result
                if any(p is None for p in call.parts):
                    return
            result = join_chunks(call.parts)
        if call.op.external and isinstance(result, (Batch, RemoteBatch)):
            self.hooks.settle(call, len(result))
        self._kept.note(call, result)
        call.finish(result)
        self.under_way.calls.pop(call.index, None)

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
