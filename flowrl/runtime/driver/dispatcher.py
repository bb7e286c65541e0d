"""Tells the state machine of each event, and hands what it answers to the threads of pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

from ...batch import Batch
from ...schedule.events import Call as Scheduled
from ...schedule.events import Command, Commit, Event, Finished, Freed, GoOn, Issued, Publish, Stage, Start, Take
from ...schedule.machine import Machine
from ...schedule.scheme import Scheme
from ..executor import Executor
from ..values.call import Call, maker
from ..values.chunks import can_cut
from ..values.remote_batch import RemoteBatch
from ..values.step_records import Hooks, StepLog
from .begin_order import BeginOrder
from .command_runner import CommandRunner
from .exchanged_groups import count_groups
from .jobs import CommandJob, GoOnJob, end_of
from .monitoring.releases import Releases
from .monitoring.row_ledger import RowLedger
from .monitoring.step_notes import StepNotes
from .pool_threads import Everywhere, Pools
from .under_way import UnderWay

QUIET = 1.0  # seconds without an event after which engines that stand still in a replay are looked at
NO_POOL = ""  # the name of the thread of calls that take no pool, unless the driver does them


class Dispatcher:
    """Tells the machine what happens, and has done what it answers.

    ``workers`` are those that train, ``servers`` the generating copies of those that have one of their own.
    ``committed`` are the steps whose commit nobody has looked at yet.
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
        self.workers, self.servers, self.scheme, self.machine, self.eager = workers, servers, scheme, machine, eager
        self.step_log, self.under_way = StepLog(), UnderWay()
        self.notes = StepNotes(scheme, self.step_log, self.under_way.changed, ledger)
        self.order = BeginOrder(scheme, executor)
        self.runner = CommandRunner(
            workers,
            servers,
            scheme,
            executor=executor,
            hooks=hooks,
            step_log=self.step_log,
            notes=self.notes,
            order=self.order,
            under_way=self.under_way,
            tell=self.tell,
        )
        self.committed: deque[int] = deque()
        home = {*scheme.home, NO_POOL} if scheme.home else ()  # ranks do all calls, also those without a pool
        self._pools = Pools(Everywhere() if eager else home, self.under_way.changed)
        self._beside: dict[tuple[int, int], int] = {}  # threads of calls that join an engine, by chunk
        self._releases = Releases(self.under_way.calls, servers)

    # -- what the session asks ------------------------------------------------------------------------------------

    def issue(self, call: Call, worker: Any) -> None:
        """Have a call run when the machine says so; in the eager runtime that is at once."""
        self.under_way.calls[call.index] = call
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
        calls = [self.under_way.calls.get(number) for number in self.machine.running]
        sample = not self.under_way.queued and all(call is not None and call.streams for call in calls)
        if sample and self.under_way.quiet > QUIET and self.order.stands_still():
            self.order.go_on()
        return False

    def settle(self) -> None:
        """Wait until nothing runs; publishes that are held for the next step stay where they are."""
        self.wait(lambda: self.machine.idle)

    def free(self) -> None:
        """In a replay: keep its order no longer, as the program issues no more."""
        if self.order.is_kept:
            with self.under_way.changed:
                self.order.free()
            self.tell(Freed())

    def close(self, wait: bool) -> None:
        """End the threads."""
        self.under_way.closing = True
        if self.order.is_kept:
            self._pools.close(wait=False)  # nothing more is begun
            with self.under_way.changed:
                self.order.free()
        self._pools.close(wait)

    def break_off(self, error: BaseException) -> None:
        """Have the driver's thread raise an error as soon as it waits."""
        self._pools.break_off(error)

    def prompts_under_way(self) -> set[int]:
        """Return the prompts whose rows calls are at that are not done, or that were made and nobody has taken yet."""
        with self.under_way.changed:
            calls = list(self.under_way.calls.values())  # some may end meanwhile
            refs = [maker(value.ref) for call in calls for value in call.values]
            known = [ref.result.keys for ref in refs if isinstance(ref.result, (Batch, RemoteBatch))]
            return {key[0] for keys in (*known, *self.runner.exchanged.keys()) for key in keys}

    def first_failure(self) -> BaseException | None:
        """Wait for what runs; the first failure in program order, which counts the others."""
        self.free()
        self.settle()
        return self.under_way.take_first_failure()

    def tell(self, event: Event, freed: Sequence[str] = ()) -> None:
        """Hand an event to the machine. What it answers goes to the pools' threads; what has no pool is done here.

        ``freed``: the pools of what is over by this event.
        """
        here = deque(self._hand_out(event, freed))
        while here:
            job = here.popleft()
            if self.runner.start(job):
                while not self.runner.finish(job):
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
        with self.under_way.changed:
            now = self.under_way.note_event()
            if isinstance(event, Finished):
                self.under_way.since.pop(event.id, None)
                self._beside.pop((event.id, event.chunk), None)
            for command in self.machine.handle(event):
                self.order.hand_out(command)
                if isinstance(command, Commit):
                    step = self.step_log.step(command.step)
                    step.begun, step.taken = self.order.take_notes()
                    self.committed.append(command.step)
                    continue
                if isinstance(command, Take):
                    self.runner.take(command)
                    continue
                if isinstance(command, GoOn):
                    self.under_way.queued += 1
                    self._pools.put(self._thread((command.pool,)), GoOnJob(self.runner, command))
                    continue
                assert isinstance(command, (Start, Stage, Publish)), command
                thread = self._thread(command.pools)
                job = CommandJob(self.runner, command, thread, now, self._releases.find(event, command, freed))
                self.under_way.queued += 1
                thread = self._thread_beside(command) or thread
                if command.pools or (isinstance(command, Start) and not self._pools.is_home(thread)):
                    self._pools.put(thread, job)
                else:
                    here.append(job)
            self._releases.forget(event)
            self.under_way.changed.notify_all()
        return here

    def _thread(self, pools: Sequence[str]) -> str:
        """Of the pools that a call takes, the one whose thread runs it: the driver's own if it is among them."""
        return next((p for p in pools if self._pools.is_home(p)), pools[0] if pools else NO_POOL)

    def _thread_beside(self, command: Command) -> str:
        """Return the name of a thread of its own for a call that asks an engine row by row, or a chunk of one: others
        of the kind are beside it, and publishes come in between. Empty for another command."""
        call = self.under_way.calls.get(command.id) if isinstance(command, Start) else None
        if call is None or not call.joins or not isinstance(command, Start):
            return ""
        key, taken = (command.id, command.chunk), set(self._beside.values())
        number = self._beside[key] = next(n for n in range(len(taken) + 1) if n not in taken)
        return f"{command.pools[0]}, beside {number}"

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
            call.site,
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
