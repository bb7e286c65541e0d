"""One rank: a process of a pool. It holds the pool's workers, runs their ops on its rows, and keeps what they make."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

from ....batch import Batch, Column
from ....errors import RunError, WrongAnswer
from ....graph.ops.op import Op
from ....graph.stand_ins.argument_trees import find_in, rebuild
from ....graph.stand_ins.values import is_handle
from ....lowering.deployment import WorkerSpec
from ....schedule.events import KeptTokens
from ....workers.base import Opening
from ....workers.decode_slots import counted
from ....workers.engine import Engine, published
from ....workers.environment_waits import EnvironmentWaits, waits_counted_in
from ....workers.model_options import Build
from ....workers.model_worker import ModelWorker
from ....workers.streaming import on_ranks
from ....workers.user_code.failed_rewards import Failures
from ....workers.user_code.rows_in_progress import NAME, Notes
from ....workers.weights.offloaded import offloaded_of
from ...local.run_op import run_op, take_passes
from ...storage.checkpoints.snapshot import Copies, capture_state, reserve_memory
from ...storage.checkpoints.state_files import StateFiles, read_record
from ...storage.disk import Checksum, write_tensors
from ...transfer.plan_moves import holdings
from ...values.process_memory import MemoryProbe
from ...values.remote_batch import DRIVER, Kind, bytes_of, column_bytes, oldest_of, sizes_of
from ...values.row_digests import RowDigests
from ...values.rows_to_fetch import Fetch, Take, assemble
from ..protocol import Advanced, Failed, Named, RankCall, RankConfig, Reply, unopened
from ..told_tokens import ToldTokens
from .call_turns import CallTurns
from .peers import Elsewhere, Peers, Policy
from .rank_journal import RankJournal
from .rank_streams import RankStreams
from .rank_weights import Weights, Written, everybody
from .serve_policies import Policies

#: How many numbers of objects a rank remembers that were freed before they were there.
EARLY = 1024


class _Now(threading.local):
    """What the call of this thread has come to."""

    def __init__(self) -> None:
        self.pulled = 0
        self.warnings: list[str] = []
        self.failures: list[Failures] = []
        self.asked = self.ready = 0.0  # when it was asked, and when its rows were there


class Rank(Weights, Policies):
    """The workers and objects of one process. ``number`` counts over all ranks of the run."""

    def __init__(self, number: int, pool: str, config: RankConfig, peers: Peers, *, host: str = "127.0.0.1") -> None:
        Weights.__init__(self, host, Path(config.folder))
        Policies.__init__(self)
        self.number, self.pool, self.config, self.peers = number, pool, config, peers
        self.objects: dict[int, Batch] = {}
        self._freed_early: dict[int, None] = {}  # what calls make that the driver has given up; the newest come last
        self._storing = threading.Lock()
        self._turns = CallTurns()
        self._journal = RankJournal(Path(config.folder) / f"journal.{pool}.{number}.jsonl")
        self._tokenizers = config.tokenizers()
        self._copies: dict[tuple[str, bool], Copies] = {}  # of the state of workers, for checkpoints
        self._captured: dict[int, Callable[[], Mapping[str, Checksum]]] = {}  # what is still to be written
        self._now = _Now()
        self._probe = MemoryProbe()
        self._notes = Notes(Path(config.folder), f"{NAME}.{pool}.{number}")
        self.streams = RankStreams(self._notes)

    # -- workers ----------------------------------------------------------------------------------------------------

    def open(self, spec: WorkerSpec) -> dict[str, Any]:
        """Open a worker here. Returns what the driver has to know of it."""
        worker = self.config.blueprints[spec.worker].make()
        self._now.warnings = []

        def open_engine(build: Build) -> Engine:
            return self.config.open_engine(
                spec.backend, replace(build, axes=spec.axes, offload=spec.offload, options=spec.options)
            )

        worker.open(
            Opening(
                open_engine=open_engine,
                peer=self._peer,
                tokenizer=self.tokenizer,
                warn=lambda text: self._now.warnings.append(text),
                seed=self.config.seed,
                device=spec.device,
                serving=spec.serving,
                notes=self._notes,
                settle=lambda found: self._now.failures.append(found),
                policies=[Named(policy) for policy in spec.policies],
            )
        )
        worker.check_kept()
        self.workers[spec.key], self.specs[spec.key] = worker, spec
        held = holdings(self.shards(spec.key))
        return {"version": worker.version, "stamp": worker.stamp, "held": held, "warnings": self._now.warnings}

    def close_workers(self) -> None:
        """Close all workers, and forget all objects: the run begins anew, or goes back to a checkpoint."""
        self.forget()
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        self.specs.clear()
        self.forget_policies()

    def forget(self) -> None:
        """Let go of all objects, of rows that are sampled and of staged weights, and read the journals again."""
        self._turns.forget()
        with self._storing:
            self.objects.clear()
        streams = list(filter(None, map(self.stream_of, self.workers)))
        for stream in streams:
            stream.let_go()
        self.streams.forget()
        self.renew_rows()
        for stream in streams:
            stream.follows = stream.kept_cache = False
        self._captured.clear()
        self.forget_weights()
        self._journal.forget()

    def program_starts(self, key: tuple[str, bool]) -> tuple[int, bool, int]:
        """A program starts: its optimizer begins anew."""
        worker = self.workers[key]
        worker.program_starts()
        return worker.version, worker.dirty, worker.stamp

    def _peer(self, handle: Any) -> Any:
        """The worker behind a handle: here, or what is known of it."""
        if not is_handle(handle):
            return handle
        here = self.workers.get((handle.name, False))
        if here is not None and not isinstance(here, ModelWorker):
            return here
        worker = unopened(self.config.blueprints, handle.name)  # of a model: the driver has its weights moved
        return Elsewhere(worker, lambda: self.tokenizer(handle))

    def tokenizer(self, said: Any) -> Any:
        """Return the tokenizer of a handle, a function, a name or a folder; of the flow's actor for None."""
        return self._tokenizers.find(said)

    # -- calls ------------------------------------------------------------------------------------------------------

    def run(self, call: RankCall) -> Reply | Failed:
        """Run a call. An error comes back as a record, with its traceback."""
        try:
            given = self._prepare(call)
            return given if isinstance(given, Failed) else self._run(call, given)
        except BaseException as error:
            return Failed.of(error)

    def begin(self, number: int, call: RankCall) -> None:
        """Begin a call whose rows leave the engine one by one; :meth:`advance` says what has come of it."""
        assert call.worker is not None, "a worker samples"
        try:
            given = self._prepare(call)
            if isinstance(given, Failed):
                self.streams.fail(number, call.worker, given)
                return
            op, worker, pulled = self._op(call), self._worker(call), self._now.pulled
            asked, ready = self._now.asked, self._now.ready

            def reply(result: Any) -> Reply:
                made = self._reply(call, op, result, given)
                made.pulled, made.times = pulled, (asked, ready, time())
                return made

            self.streams.begin(number, call, op, worker, given, reply)
        except BaseException as error:
            self.streams.fail(number, call.worker, Failed.of(error))

    def advance(self, key: tuple[str, bool], wanted: Mapping[int, int], most: int | None = None) -> Advanced:
        """Sample for a short time, by ``most`` steps, the rows of the calls that were begun with a worker.

        ``wanted``: calls that are not answered, with the number of the last message that was heard of their tokens.
        """
        self._now.pulled, self._now.warnings, self._now.failures = 0, [], []
        return self.streams.advance(key, wanted, most)

    def begin_again(self, key: tuple[str, bool], wanted: Mapping[int, KeptTokens]) -> dict[int, ToldTokens]:
        """Begin calls again as if this rank had been lost; returns the tokens from which their rows go on."""
        self._now.pulled, self._now.warnings, self._now.failures = 0, [], []
        return self.streams.begin_again(key, wanted, self.workers[key].version)

    def _prepare(self, call: RankCall) -> dict[str, Any] | Failed:
        """Free what the driver no longer needs, and return what an op is called with.

        Rows are ended that somebody who died has asked a worker for which has its turn again: where ranks split its
        engine the first one does it for all, and the others wait for it as they agree on the arguments.
        """
        self._now.asked = time()
        self.free(call.frees)
        op = self._op(call)
        if call.worker is not None and (op.updates or op.cost == "generate"):
            self.end_rows(call.worker)
        self._now.pulled, self._now.warnings, self._now.failures = 0, [], []
        arguments = self._arguments(call)
        self._now.ready = time()
        return arguments

    def free(self, ids: Sequence[int]) -> None:
        """Forget objects, those too that are still being made."""
        with self._storing:
            for id in ids:
                if self.objects.pop(id, None) is None:
                    self._freed_early[id] = None
            for id in list(self._freed_early)[:-EARLY]:
                del self._freed_early[id]

    def _store(self, id: int, rows: Batch) -> None:
        """Keep an object, unless it was freed meanwhile."""
        with self._storing:
            if id not in self._freed_early:
                self.objects[id] = rows

    def pull(self, id: int, names: Sequence[str], rows: Sequence[int]) -> dict[str, Column]:
        """Rows of some columns of an object here, for another rank."""
        held = self.objects[id]
        whole = list(rows) == list(range(len(held)))
        return {n: held[n] if whole else held[n].take(list(rows)) for n in names}

    def give(self, id: int) -> Batch:
        """All of an object here, for another rank."""
        return self.objects[id]

    def keep_copy(self, rank: int, id: int) -> int:
        """Keep an object that another rank has. Returns the bytes that came."""
        self.objects[id] = self.ask(rank, "give", id)
        return sum(column_bytes(self.objects[id]).values())

    def materialise(self, wanted: Fetch) -> Batch | Column:
        """Put together what is asked for from here and from other ranks."""
        return assemble(wanted, self._get)

    def _get(self, take: Take) -> Mapping[str, Column]:
        if take.batch is not None:
            return {n: take.batch[n] for n in take.names}
        if take.rank == self.number:
            return self.pull(take.id, take.names, take.rows)
        assert take.rank != DRIVER, "what the driver drew comes with the call"
        brought = self.ask(take.rank, "pull", take.id, take.names, take.rows)
        self._now.pulled += sum(bytes_of(c) for c in brought.values())
        return brought

    def ask(self, rank: int, method: str, *args: Any) -> Any:
        """Call another rank, or this one, and wait. Raises what failed there."""
        return self.ask_all([(rank, method, *args)])[0]

    def ask_all(self, calls: Sequence[tuple[Any, ...]], peers: Peers | None = None) -> list[Any]:
        """Several calls at once, as (rank, method, arguments ...)."""
        others = peers or self.peers
        away = [others.call(*call) if call[0] != self.number else None for call in calls]
        answers = [
            getattr(self, call[1])(*call[2:]) if there is None else there()
            for there, call in zip(away, calls, strict=True)
        ]
        for (rank, *_), answer in zip(calls, answers, strict=True):
            if isinstance(answer, Failed):
                raise answer.raised(rank)
        return answers

    def _arguments(self, call: RankCall) -> dict[str, Any] | Failed:
        """What an op is called with, its rows brought here.

        Of ranks that compute together none begins where one lacks its rows: it would wait for that one in the midst of
        the op.
        """

        def given(item: Any) -> Any:
            if isinstance(item, Fetch):
                return self.materialise(item)
            return self._handle(item, call) if isinstance(item, Named) else item

        failed = arguments = None
        try:
            arguments = rebuild(dict(call.arguments), given)
        except Exception as error:
            failed = Failed.of(error)
        all_here = failed is None
        if call.worker is not None and self.specs[call.worker].collective:
            worker = self.workers[call.worker]
            engine = worker.engine if isinstance(worker, ModelWorker) else None
            all_here = not engine.any_rank(not all_here) if on_ranks(engine) else everybody(all_here)
        if failed is None and not all_here:
            failed = Failed(None, "another rank of the call lacks its rows", "", elsewhere=True)
        if failed is not None:
            failed.before = True
            return failed
        assert arguments is not None, "nothing failed"
        return arguments

    def _run(self, call: RankCall, arguments: Mapping[str, Any]) -> Reply:
        worker, op = self._worker(call), self._op(call)
        with self._turn(call, op, arguments), counted() as slots, waits_counted_in(EnvironmentWaits()) as waits:
            result = run_op(
                op,
                worker,
                arguments,
                call.into,
                call.info,
                place=call.journal,
                journal=lambda: self._journal.get(call.journal_since, call.epoch),
                notes=self._notes,
                warn=self._now.warnings.append,
            )
        if call.worker is not None and op.updates == "weights" and call.worker not in self._copies:
            copies = self._copies[call.worker] = Copies()  # its checkpoints will need this memory
            reserve_memory(worker, copies, offloaded=offloaded_of(worker))
        reply = self._reply(call, op, result, arguments)
        reply.slots = tuple(each if each.rank is not None else replace(each, rank=self.number) for each in slots)
        reply.waits = waits if waits.count else None
        return reply

    def _turn(self, call: RankCall, op: Op, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """What a call that touches the world waits for: others at its place that have any of its rows."""
        if call.journal is None:
            return nullcontext()
        main = arguments.get(op.batch_parameter)
        return self._turns.turn(call.journal, main.keys if isinstance(main, Batch) else ())

    def _op(self, call: RankCall) -> Op:
        if not isinstance(call.op, str):
            return call.op
        assert call.worker is not None, "an op that is named is a worker's"
        return inspect.getattr_static(type(self.workers[call.worker]), call.op)

    def _reply(self, call: RankCall, op: Op, result: Any, arguments: Mapping[str, Any]) -> Reply:
        """Keep what a call gives; return what the driver is told of it."""
        first = next(find_in(dict(call.arguments), Fetch), None)
        reply = self._kept(call, op, result, arguments, first)
        if call.worker is not None:
            worker = self.workers[call.worker]
            reply.weights = (worker.version, worker.dirty, worker.stamp)
            reply.passes = take_passes(op, worker)
        reply.pulled, reply.warnings = self._now.pulled, tuple(self._now.warnings)
        reply.failures = tuple(self._now.failures)
        reply.times, reply.memory = (self._now.asked, self._now.ready, time()), self._probe.look()
        return reply

    def move(self, route: str, source: tuple[str, bool], number: int | None, target: tuple[str, bool] | None) -> Any:
        """Do this rank's part of moves of weights; rows that the target samples stand still from here on."""
        if target is not None:
            self.hold_rows(target)
            if route not in self.routes:  # it was given up, or the run goes back: nobody lets the rows go on any more
                self.leave_rows(target)
                raise RunError(f"nobody waits any more for the moves {route}.")
            self.streams.pause(target)
        return super().move(route, source, number, target)

    def weights_written(self, key: tuple[str, bool], version: int, keep_cache: bool = False) -> Written:
        """Somebody has written into the weights: they are a version now, under which rows go on."""
        stamped, _ = super().weights_written(key, version, keep_cache)
        self.streams.resume(key, version, keep_cache=keep_cache)
        if (stream := self.stream_of(key)) is not None:
            stream.kept_cache |= keep_cache
            stream.let_go()
        return stamped, published(self.workers[key])  # some engines prove them as rows go on

    def weights_written_in_turn(self, key: tuple[str, bool], version: int, keep_cache: bool = False) -> Written:
        """The same, in the lane of calls: after those that were begun before, and before those that come."""
        return self.weights_written(key, version, keep_cache)

    def _worker(self, call: RankCall) -> Any:
        if call.worker is None:
            return None
        worker = self.workers[call.worker]
        version = call.weights[0]
        if self.specs[call.worker].serving and worker.version != version:
            raise WrongAnswer(f"the weights here are version {worker.version}, and the call is for version {version}.")
        worker.version, worker.dirty = call.weights
        return worker

    def _handle(self, named: Named, call: RankCall) -> Any:
        """A worker that was handed to an op: it is called from here."""
        at = call.policies.get(named.name)
        if at is None:  # an op that looks at its weights
            if (named.name, False) in self.workers:
                return self.workers[named.name, False]
            raise RunError(
                f"{call.title} takes the weights of '{named.name}', which is in another pool.",
                fix=f"Place both in one pool, with the same mesh and backend as '{named.name}'.",
            )
        if at.ranks == (self.number,) and not at.beside:
            return self.follow(at) if at.follows else self.serving(named.name)
        return Policy(self, at)

    def _kept(self, call: RankCall, op: Op, result: Any, arguments: Mapping[str, Any], first: Fetch | None) -> Reply:
        """Keep rows and columns here; numbers go to the driver."""
        if isinstance(result, Column):
            keys = first.keys if first is not None and len(first.keys) == len(result) else None
            keys = keys or tuple((i,) for i in range(len(result)))
            result, column = Batch(keys, {"value": result}), True
        elif isinstance(result, Batch):
            column = False
            main = next((a for a in arguments.values() if isinstance(a, Batch)), None)
            if op.inherits and main is not None:
                result = result.select(*(n for n in result.fields if n not in main.fields))
        else:
            return Reply(value=result)
        if call.keep and result.fields:
            self._store(call.keep, result.with_call(None))
        kinds = {n: Kind.of(result[n]) for n in result.fields}
        digests = RowDigests.of(result, kinds) if call.keep else RowDigests(())
        alike = first is not None and result.keys == first.keys
        keys = None if alike else result.keys
        sizes, size, oldest = sizes_of(result), column_bytes(result), oldest_of(result) or ()
        found = {"check": _check(result, digests), "digests": (digests.fields, digests.rows)} if call.keep else {}
        return Reply(None, keys, alike, kinds, sizes, size, oldest, column=column, **found)

    def sync(self) -> None:
        """Have the disk hold the journal."""
        self._journal.sync()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def capture_state(
        self, id: int, key: tuple[str, bool], folder: str, file: str, part: int, weights: tuple[int, bool]
    ) -> int:
        """Copy this rank's part of a worker's state for :meth:`write_captured`; the first part has what is no tensor.

        Returns the bytes that lack for a copy: where there are any, the worker must not change until it is written.
        """
        worker = self.workers[key]
        worker.version, worker.dirty = weights
        copies = self._copies.setdefault(key, Copies())
        captured = capture_state(Path(folder), file, worker, copies, part=part, offloaded=offloaded_of(worker))
        self._captured[id] = captured.write
        return captured.lacking

    def write_captured(self, id: int) -> Mapping[str, Checksum]:
        """Write what was captured into the checkpoint, in a lane of its own. Returns the checksums of the files."""
        return self._captured.pop(id)()

    def load_state(self, key: tuple[str, bool], folder: str, file: str) -> tuple[int, bool, int]:
        """Take a worker's state back, whichever ranks have written it."""
        worker = self.workers[key]
        with StateFiles(Path(folder), file) as files:
            worker.load_state_shards(files, read_record(Path(folder), file))
        return worker.version, worker.dirty, worker.stamp

    def bring(self, wanted: Fetch) -> Batch | Column | Failed:
        """Rows for a reader of the run."""
        try:
            return self.materialise(wanted)
        except Exception as error:
            return Failed.of(error)

    def capture_rows(self, wanted: Fetch, id: int, path: str) -> dict[str, Any]:
        """Keep rows that the program holds for :meth:`write_captured`; returns what is no tensor of them."""
        made = self.materialise(wanted)
        batch = made if isinstance(made, Batch) else Batch(wanted.keys, {"value": made})
        tensors, file = batch.tensors(), Path(path)
        self._captured[id] = lambda: {file.name: write_tensors(file, tensors)} if tensors else {}
        return batch.meta()


def _check(rows: Batch, digests: RowDigests) -> str:
    """What tells rows from others, and from these in another order. Keys are numbers, which hash alike everywhere."""
    return f"{hash(rows.keys)} {sorted(digests.fields.items())}"
