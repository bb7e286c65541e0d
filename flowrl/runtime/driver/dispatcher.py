"""Who does what the state machine says: calls and moves of weights, each in the thread of its pool."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

from ...batch import Batch
from ...errors import FlowError, RankLost, ResumeError, RunError
from ...graph.op import Op
from ...graph.relaxed import Site
from ...graph.values import is_handle, replace_values
from ...schedule.events import Call as Scheduled
from ...schedule.events import Command, Commit, Event, Finished, Issued, Memory, Publish, Stage, Start
from ...schedule.machine import Machine
from ...schedule.scheme import Scheme
from ..storage.recorder import first_groups
from ..storage.traffic import bytes_made, bytes_read, lags, row_tokens
from ..values.call import Call, NotKept, maker, outcome
from ..values.chunks import NOTHING, Cutter, can_cut, chunk_of, together
from ..values.records import StepLog, Timing
from ..values.remote_batch import Remote
from .pool_threads import Everywhere, Pools

MOVE = 1 << 62  # stands for a move of weights among the numbers of calls
LIBRARY = "(library)"  # the thread of calls that take no pool and are not done in this process


class Hands(Protocol):
    """Who runs a call: this process (:class:`flowrl.runtime.local.calls.Here`), or ranks."""

    def home(self, workers: Mapping[str, Any], scheme: Scheme) -> Container[str]: ...
    def far(self, command: Command) -> bool: ...
    def begin(self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]: ...
    def swap(self, command: Start, groups: Callable[[str], Any], memory: Mapping[str, Memory]) -> None: ...
    def drawn(self, batch: Batch) -> Any: ...
    def readable(self, value: Any) -> Any: ...


class Skipped(Exception):
    """A call whose input failed: not run."""


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
        hands: Hands,
        eager: bool,
        sampled: Callable[[int], int] = lambda step: 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.workers, self.servers, self.scheme, self.machine = workers, servers, scheme, machine
        self.hands, self.eager, self.sampled, self.clock = hands, eager, sampled, clock
        self.step_log = StepLog()
        self.cutter = Cutter(scheme.setup.chunks)
        self.failures: list[tuple[int, BaseException]] = []
        self.committed: deque[int] = deque()
        self._changed = threading.Condition()
        self._pools = Pools(Everywhere() if eager else hands.home(workers, scheme), self._changed)
        self._driver = threading.current_thread()
        self._issued: dict[int, Call] = {}  # not done yet
        self._staged: dict[tuple[str, int], Any] = {}
        self._free: dict[str, float] = {}  # by thread: when its last call was through

    # -- what the session asks ------------------------------------------------------------------------------------

    def issue(self, call: Call, worker: Any) -> None:
        """Have a call run when the machine says so; in the eager runtime that is at once."""
        self._issued[call.index] = call
        self.tell(Issued(self._scheduled(call, worker)))
        if self.eager:
            self.wait(lambda: call.done)

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once a condition holds; the driver's thread runs what is at home meanwhile."""
        self._pools.wait(done)

    def settle(self) -> None:
        """Wait until nothing runs; publishes that are held for the next step stay where they are."""
        self.wait(lambda: self.machine.idle)

    def close(self, wait: bool) -> None:
        """End the threads."""
        self._pools.close(wait)

    def first_failure(self) -> BaseException | None:
        """Wait for what runs; the first failure in program order, which counts the others."""
        self.settle()
        found = ((i, e) for i, e in self.failures if not isinstance(e, Skipped))
        failed = sorted(found, key=lambda f: (not isinstance(f[1], RankLost), f[0]))  # a loss explains the others
        self.failures.clear()
        if not failed:  # what they waited for was told before, and caught by the program
            return None
        first = failed[0][1]
        if len(failed) > 1:
            first.add_note(f"({len(failed) - 1} more calls of this step failed after it)")
        return first

    def tell(self, event: Event) -> None:
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
                    self.committed.append(command.step)
                    continue
                assert isinstance(command, (Start, Stage, Publish)), command
                if command.pools or self.hands.far(command):
                    self._pools.put(self._thread(command.pools), lambda command=command: self._work(command))
                else:
                    here.append(command)
            self._changed.notify_all()
        return here

    def _thread(self, pools: Sequence[str]) -> str:
        """Of the pools that a call takes, the one whose thread runs it: the driver's own if it is among them."""
        return next((p for p in pools if self._pools.is_home(p)), pools[0] if pools else LIBRARY)

    def _work(self, command: Command) -> Callable[[], None] | None:
        """Do what the machine says and tell it; what is given is the rest of that."""
        rest: Callable[[], None] | None = None
        try:
            rest = self._begun(command)
        finally:
            if rest is None:
                self.tell(_done(command))
        return None if rest is None else lambda: self._ended(command, rest)

    def _ended(self, command: Command, rest: Callable[[], None]) -> None:
        try:
            rest()
        finally:
            self.tell(_done(command))

    def _do(self, command: Command) -> None:
        if (rest := self._begun(command)) is not None:
            rest()

    def _begun(self, command: Command) -> Callable[[], None] | None:
        """Begin a call, or make a move. Gives what is left to do, if anything."""
        if isinstance(command, Start):
            call = self._issued.get(command.id)
            return self._begin(call, command) if call is not None else None  # None: another chunk of it has failed
        assert isinstance(command, (Stage, Publish)), command
        start, moved = self.clock(), 0
        try:
            moved = self._move(command)
        except BaseException as error:
            self._failed(MOVE, error)
        if isinstance(command, Publish) and command.worker in self.servers:
            title = f"{command.worker}.publish"
            with self._changed:
                step = self.step_log.steps.get(command.step, self.step_log.outside)
                step.timings.append(Timing(title, command.step, command.pools[0], start, self.clock()))
                step.traffic.weights[title] = step.traffic.weights.get(title, 0) + moved
        return None

    def _move(self, command: Stage | Publish) -> int:
        """Set weights aside, or install them where they generate. Returns the bytes that went there."""
        worker, key = self.workers[command.worker], (command.worker, command.version)
        if isinstance(command, Stage):
            self._staged[key] = worker.stage()
            worker.published(command.version)  # from here on it is trained as the next one
            return 0
        if key in self._staged:
            return self.servers[command.worker].install(self._staged.pop(key), command.version) or 0
        worker.published(command.version)
        if command.worker in self.servers:
            return self.servers[command.worker].install(worker.in_use(), command.version) or 0
        return 0

    def _begin(self, call: Call, command: Start) -> Callable[[], None] | None:
        """Begin one call, or a chunk of it, in the thread that this is called in; what is given waits for it."""
        start = self.clock()
        try:
            if any(isinstance(error, RankLost) or number == MOVE for number, error in self.failures):
                raise Skipped(f"{call.title} was not run: what it needs is lost")
            if command.offload or command.onload:
                self.hands.swap(command, self._resident, self.scheme.setup.memory)
            worker = self._worker(call.op, call.worker)
            given = replace_values(call.arguments, lambda v: self._given(v.ref, call, command))
            arguments = {name: self._open_handle(value) for name, value in given.items()}
            batch = next((a for a in arguments.values() if isinstance(a, (Batch, Remote))), None)
            nothing = call.parts is not None and any(a is NOTHING for a in arguments.values())
            if call.op.owner != "data":
                self._note_begin(call, command.chunk, worker, {} if nothing else arguments, batch)
            if nothing:
                return lambda: self._end(call, command, lambda: NOTHING, None, start)
            wait = self.hands.begin(call, command.chunk, worker, arguments)
        except BaseException as error:
            self._broke(call, error)
            return None
        return lambda: self._end(call, command, wait, batch, start)

    def _end(
        self, call: Call, command: Start, wait: Callable[[], Any], batch: Batch | Remote | None, start: float
    ) -> None:
        """Wait for a call that was begun."""
        thread = self._thread(command.pools)
        if command.pools:
            start = max(start, self._free.get(thread, start))  # until then the pool was at the one before
        try:
            result = wait()
            took = self._free[thread] = self.clock()
            self._kept(call, command, result)
        except BaseException as error:
            self._broke(call, error)
            return
        if result is not NOTHING and call.op.owner != "data":
            self._note(call, command.chunk, result, batch, start, took)

    def _broke(self, call: Call, error: BaseException) -> None:
        told = error if isinstance(error, Skipped) else _told(error, call)
        call.finish(None, call.error or told)
        self._issued.pop(call.index, None)
        self._failed(call.index, told)

    def _failed(self, number: int, error: BaseException) -> None:
        """Keep a failure for the driver, which raises it; what stops a whole program stops the driver's thread now."""
        self.failures.append((number, error))
        if not isinstance(error, Exception) and threading.current_thread() is self._driver:
            raise error

    def _kept(self, call: Call, command: Start, result: Any) -> None:
        """Keep a result; that of a chunk until all chunks are there."""
        if call.parts is not None:
            with self._changed:
                call.parts[command.chunk] = result
                if any(p is None for p in call.parts):
                    return
            result = together(call.parts)
        step = self.step_log.of(call)
        if isinstance(result, (Batch, Remote)) and "response_ids" in result.fields and call.index > step.last:
            step.rows, step.last = result, call.index
        if call.op.updates and isinstance(step.rows, Remote) and (count := self.sampled(step.number)):
            # Once this is published, those that lie on a rank that is lost cannot be made again.
            step.rows = self.hands.readable(first_groups(step.rows, count))
        call.finish(result)
        self._issued.pop(call.index, None)

    def _given(self, ref: Any, call: Call, command: Start) -> Any:
        made = maker(ref)
        if made.error is not None:
            raise Skipped(f"{call.title} was not run: {made.title} failed")
        if made.result is NotKept:
            raise ResumeError(
                f"{call.title} needs the result of {made.title} from before the checkpoint, which nothing held then.",
                fix="Resume with the script that the run was started with.",
            )
        if command.chunks > 1 and call.parts is not None:
            return chunk_of(ref, command.chunk, self.cutter, call.step)
        return outcome(ref)

    def _resident(self, name: str) -> Any:
        """The copy of a worker behind what a memory holds: ``actor.train``, ``actor.generate``."""
        worker, _, use = name.rpartition(".")
        return self.servers.get(worker, self.workers[worker]) if use == "generate" else self.workers[worker]

    def _worker(self, op: Op, name: str | None) -> Any:
        """The copy of a worker that an op runs on."""
        if name is None:
            return None
        return self.servers.get(name, self.workers[name]) if op.cost == "generate" else self.workers[name]

    def _open_handle(self, value: Any) -> Any:
        return self.servers.get(value.name, self.workers[value.name]) if is_handle(value) else value

    def _note_begin(
        self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any], rows: Batch | Remote | None
    ) -> None:
        """Note what a call is given: bytes by field, and of an update how old its rows are."""
        read = bytes_read(call, worker, arguments) if arguments else {}
        found = lags(call, worker.version, rows) if call.op.updates == "weights" else {}
        with self._changed:
            traffic, node = self.step_log.of(call).traffic, self._node(call)
            _add(traffic.calls, {node: int(chunk == 0)})
            _add(traffic.reads.setdefault(node, {}), read)
            _add(traffic.lags, found)

    def _node(self, call: Call) -> str:
        """The id of a call in the graph."""
        return self.scheme.nodes.get(self._site(call), call.title)

    def _site(self, call: Call) -> Site:
        """By what a call is known to the trace."""
        return (call.title, call.at.file, call.at.line) if call.at is not None else (call.title, "", 0)

    def _note(
        self, call: Call, chunk: int, result: Any, given: Batch | Remote | None, start: float, end: float
    ) -> None:
        """Note what a call took and made. Arithmetic on fields takes no pool and no time worth a line."""
        rows = result if isinstance(result, (Batch, Remote)) else given
        length = tokens_of(rows, "tokens")
        pools = self.scheme.pools(call.op, call.worker)
        made = bytes_made(result, given, call.op)
        with self._changed:
            step, node = self.step_log.of(call), self._node(call)
            _add(step.traffic.makes.setdefault(node, {}), made)
            if call.worker is None and call.op.owner == "batch":
                return
            pool = pools[0] if pools else ""
            size = 0 if rows is None else len(rows)
            step.timings.append(Timing(node, call.step, pool, start, end, size, length, call.index, chunk))
            if call.op.cost in ("generate", "external") and call.op.rows == "expand":
                name = "" if self._site(call) in self.scheme.main else node
                tokens, responses = step.sampled.get(name, (0, 0))
                step.sampled[name] = tokens + tokens_of(result, "response_ids"), responses + len(result)
                step.traffic.prompts += row_tokens(result, "prompt_ids")
                step.traffic.responses += row_tokens(result, "response_ids")

    def _scheduled(self, call: Call, worker: Any) -> Scheduled:
        """A call as the schedule sees it."""
        refs = [v.ref for v in call.values]
        cut = self.scheme.setup.chunks > 1 and bool(refs) and all(can_cut(r) for r in refs)
        made = self.scheme.call(
            call.index,
            -1 if call.outside else call.step,
            call.op,
            call.worker,
            self._site(call),
            inputs=dict.fromkeys(m.index for m in map(maker, refs) if not m.done),
            handles=call.handles,
            init=worker.arguments if worker else {},
            arguments=call.arguments if cut else {},
            cut=cut,
        )
        if made.rowwise:
            call.parts = [None] * self.scheme.setup.chunks
        return made


def _add(total: dict[Any, int], counts: Mapping[Any, int]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count


def tokens_of(rows: Any, name: str) -> int:
    """How many tokens a field has in all rows; 0 where there is none."""
    if isinstance(rows, Remote):
        return rows.count(name)
    return int(rows[name].values.shape[0]) if isinstance(rows, Batch) and name in rows.fields else 0


def _done(command: Command) -> Event:
    assert isinstance(command, (Start, Stage, Publish)), command
    return Finished(command.id, command.chunk if isinstance(command, Start) else 0)


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
