"""Workers in the process of the driver: opened when they are first needed, and kept from program to program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ...errors import FlowError, ModelError, RankLost, WorkerError
from ...graph.stand_ins.values import is_handle
from ...graph.tracing.trace_records import HandleLike
from ...lowering.deployment import Deployment, Deployments, WorkerSpec
from ...workers.base import Opening, Worker
from ...workers.decode_passes import DecodePasses
from ...workers.decode_slots import DecodeSlots, counted_in
from ...workers.engine import Engine, Published, published
from ...workers.environment_waits import EnvironmentWaits, waits_counted_in
from ...workers.headway import Headway, headway
from ...workers.model_options import Build
from ...workers.model_worker import ModelWorker
from ...workers.streaming import streams
from ...workers.tokens.tokenizer import Tokenizers
from ...workers.weights.offloaded import offloaded_of, sleep, wake
from ..executor import PendingCall, RowsAgain, RunServices, open_copies
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.snapshot import Captured, Copies, capture_state, reserve_memory
from ..storage.journal import Journal
from ..values.call import Call
from ..values.process_memory import MemoryProbe, ProcessMemory
from ..values.remote_batch import RemoteColumn
from ..values.step_records import RankTime
from .run_op import run_op, take_passes
from .shared_engine import SharedEngine, StreamedCall


@dataclass
class LocalExecutor:
    """Opens workers in this process: see :class:`flowrl.runtime.executor.Executor`.

    ``deployments`` say how, by worker and whether it is the copy that generates; ``open_engine`` asks a backend.
    """

    declared: Mapping[str, HandleLike]
    open_engine: Callable[[str, Build], Engine]
    deployments: Deployments = field(default_factory=dict[tuple[str, bool], Deployment])
    seed: int = 0
    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    servers: dict[str, Worker] = field(default_factory=dict[str, Worker])  # generating copies of their own
    run: RunServices = field(default_factory=RunServices)
    _copies: dict[str, Copies] = field(default_factory=dict[str, Copies])  # of states, for checkpoints
    _shared: dict[str, SharedEngine] = field(default_factory=dict[str, SharedEngine])  # of servers that calls share
    _probe: MemoryProbe = field(default_factory=MemoryProbe)

    def __post_init__(self) -> None:
        workers = {name: (d.cls, d.arguments) for name, d in self.declared.items()}
        self._tokenizers = Tokenizers(workers, lambda name: cast("Any", self.open(name)).tokenizer)

    def attach(self, run: RunServices) -> None:
        """Use the services of a run from here on."""
        self.run = run

    def open(self, name: str) -> Worker:
        """Return the worker of that name, in memory; opens it the first time. Raises WorkerError where that fails."""
        if name not in self.workers:
            self.workers[name] = self._open(name, serving=False)
        self.onload(f"{name}.train")
        return self.workers[name]

    def open_server(self, name: str) -> Worker:
        """Return the copy of a worker that generates; opens it the first time, with the weights of the trained one."""
        if name not in self.servers:
            trained = self.open(name)
            server = self._open(name, serving=True)
            server.install(trained.in_use(), trained.version)
            self.servers[name] = server
        self.onload(f"{name}.generate")
        return self.servers[name]

    def start_program(self, names: Iterable[str], *, resumed: bool) -> None:
        """Have the optimizers and copies of a program's workers begin anew, unless it is ``resumed``."""
        if not resumed:
            self.begin_anew(names)

    def begin_anew(self, names: Iterable[str]) -> None:
        """Have optimizers begin anew, and copies of other workers take their weights."""
        for name in names:
            self.workers[name].program_starts()

    # -- calls ------------------------------------------------------------------------------------------------------

    def start(self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any]) -> PendingCall:
        """Return a call that is run by the thread that waits for it: of a pool, those alone are run side by side that
        share an engine."""
        del chunk
        if call.streams and (shared := self._share(call.worker, worker)) is not None:
            more: Any = {"engine": shared, "notes": self.run.notes, "warn": self.run.warn}
            return StreamedCall(call.op, worker, arguments, call.into, call.info, **more)
        if call.joins:
            for policy in (a for a in arguments.values() if isinstance(a, ModelWorker)):
                self._follow(policy)
        return LocalCall(call, worker, arguments, self.run, self._reserve)

    def _follow(self, policy: Any) -> None:
        """Have the engine of a copy that generates count versions: publishes come while others ask it row by row."""
        with policy.stream.held():
            self._share(policy.name, policy)
            policy.stream.follows = True

    def _stream(self, name: str) -> Any:
        """Return by what others ask the engine of a copy that generates row by row; None where they do not."""
        return getattr(self.servers.get(name), "stream", None)

    def _reserve(self, name: str, worker: Worker) -> None:
        """After its first update begin to take memory for a copy of a worker's state, which a checkpoint will need."""
        if name not in self._copies:
            copies = self._copies[name] = Copies()
            reserve_memory(worker, copies, offloaded=offloaded_of(worker))

    def _share(self, name: str | None, worker: Worker) -> SharedEngine | None:
        """Return the engine of a copy that generates, for calls side by side; None where it takes whole calls alone."""
        if name not in self._shared and isinstance(worker, ModelWorker) and streams(worker.engine):
            self._shared[str(name)] = SharedEngine(worker.engine, worker.version)
        return self._shared.get(str(name))

    def engine_steps(self, name: str) -> dict[int, tuple[int, bool]]:
        """Return how many steps the engine of a worker has made for calls that share it, and whether rows run."""
        shared = self._shared.get(name)
        return {} if shared is None else {0: (shared.steps, bool(shared.engine.running()))}

    def hold_engines(self, name: str, steps: Mapping[int, int] | None) -> None:
        """Have the engine of a worker make no more than so many steps in all; None: as many as it likes."""
        if name in self._shared:
            self._shared[name].most = None if steps is None else steps.get(0)

    def choose_ranks(self, name: str, ranks: tuple[int, ...]) -> None:
        """Do nothing: there is one process."""

    def rows_begun_again(self, name: str) -> list[RowsAgain]:
        """Return nothing: there are no ranks that could be lost."""
        return []

    def keep_open(self, name: str, parts: Collection[tuple[int, int, int]]) -> None:
        """Do nothing: no run in one process has such rows."""

    def begin_rows_again(self, name: str, again: RowsAgain) -> None:
        """Do nothing: no run in one process has such rows."""

    def put(self, value: Any) -> Any:
        """Return a value as calls take it: as it is, but for a column that ranks have written into a checkpoint."""
        batch = value.source.stored[0].batch if isinstance(value, RemoteColumn) else None
        return value if batch is None else batch[value.source.names[0]]

    def get(self, value: Any) -> Any:
        """Return a value: what calls give is in this process."""
        return value

    # -- weights, memory and state ----------------------------------------------------------------------------------

    def stage(self, name: str) -> Any:
        """Return a copy of a worker's weights as they are now."""
        return self.open(name).stage()

    def install(self, name: str, version: int, weights: Any = None, *, keep_cache: bool = False) -> int:
        """Give the copy that generates ``weights`` that were staged, or those that the worker has."""

        given = self.open(name).in_use() if weights is None else weights

        def write() -> int:
            return self.open_server(name).install(given, version) or 0

        stream = self._stream(name)
        with nullcontext() if stream is None else stream.held():
            shared = self._shared.get(name)
            if shared is None:
                return write()
            if stream is not None:
                stream.kept_cache |= keep_cache
            return shared.publish(write, version, keep_cache=keep_cache)

    def published(self, name: str) -> Published | None:
        """Return what the engine that generates said of the weights that it was last given."""
        return published(self.servers.get(name))

    def offload(self, resident: str, forecast: float | None = None) -> None:
        """Take weights and optimizer of a worker out of its device's memory; its next call needs them back."""
        del forecast
        sleep(self._resident(resident))

    def onload(self, resident: str, forecast: float | None = None) -> None:
        """Bring them back."""
        del forecast
        if resident.rpartition(".")[0] in self.workers:
            wake(self._resident(resident))

    def _resident(self, name: str) -> Worker:
        """Return the copy of a worker behind what a memory holds: ``actor.train``, ``actor.generate``."""
        worker, _, use = name.rpartition(".")
        return self.servers.get(worker, self.workers[worker]) if use == "generate" else self.workers[worker]

    def capture(
        self, folder: Path, manifest: Mapping[str, Any], live: Mapping[int, Any], *, after: int = -1
    ) -> checkpoint.Begun:
        """Begin a checkpoint: copy the state of all open workers and values that calls gave."""

        def state(part: Path, name: str, worker: Worker) -> Captured:
            copies = self._copies.setdefault(name, Copies())
            return capture_state(part, name, worker, copies, offloaded=offloaded_of(worker))

        return checkpoint.begin(folder, manifest, open_copies(self), live, capture_state=state, after=after)

    def sync(self) -> None:
        """Have the disk hold all answers of the world so far."""
        if self.run.journal is not None:
            self.run.journal.sync()

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Do nothing: there is nothing besides the workers."""

    def recover(self, lost: RankLost) -> None:
        """Raise ``lost``: what a process has lost of itself it cannot start again."""
        raise lost

    def reset(self) -> None:
        """Close all workers, to be opened as they were made."""
        self.close()

    def unanswered(self) -> list[dict[str, Any]]:
        """Return nothing: there are no ranks."""
        return []

    def headway(self) -> Mapping[str, Headway]:
        """Return how far this process has come."""
        return {"driver": headway()}

    def memory(self) -> Mapping[str, ProcessMemory]:
        """Return the memory of this process."""
        return {"driver": self._probe.look()}

    def record(self) -> Mapping[str, Any]:
        """Return nothing: where a process ran is said by its run."""
        return {}

    def _deployment(self, name: str, serving: bool = False) -> Deployment:
        """Return where a copy of a worker is; without a plan wherever its backend takes it."""
        return self.deployments.get((name, serving)) or Deployment("", WorkerSpec(name, serving, device="auto"))

    def _open(self, name: str, *, serving: bool) -> Worker:
        declared, spec = self.declared[name], self._deployment(name, serving).spec
        worker = declared.cls(*declared.args, **declared.kwargs)
        worker.name = name
        worker.init_arguments = declared.arguments
        opening = Opening(
            open_engine=lambda build: self.open_engine(spec.backend, replace(build, options=spec.options)),
            peer=lambda handle: self.open(handle.name) if is_handle(handle) else handle,
            tokenizer=self.tokenizer,
            warn=self.run.warn,
            apart=lambda handle: "" if self._in_one_pool(name, handle) else "it is in another pool",
            seed=self.seed,
            device=spec.device,
            serving=serving,
            notes=self.run.notes,
            settle=self.run.failed.note,
            policies=[self.declared[policy] for policy in spec.policies],
        )
        try:
            worker.open(opening)
            worker.check_kept()
        except FlowError as error:
            error.at = error.at or (declared.model_at if isinstance(error, ModelError) else declared.at)
            raise
        except Exception as error:
            raise WorkerError(
                f"worker '{name}' could not be opened: {type(error).__name__}: {error}", at=declared.at
            ) from error
        return worker

    def _in_one_pool(self, name: str, handle: Any) -> bool:
        return is_handle(handle) and self._deployment(handle.name).pool == self._deployment(name).pool

    def tokenizer(self, said: Any) -> Any:
        """Return the tokenizer of a handle, a function, a name or a folder; of the flow's actor for None."""
        return self._tokenizers.find(said)

    def close(self) -> None:
        """Close every open worker."""
        for worker in (*self.workers.values(), *self.servers.values()):
            worker.close()
        self.workers.clear()
        self.servers.clear()
        self._shared.clear()


@dataclass(frozen=True)
class LocalCall:
    """A call that is run as soon as somebody waits for it."""

    call: Call
    worker: Any
    arguments: Mapping[str, Any]
    run: RunServices
    updated: Callable[[str, Any], None] = lambda name, worker: None  # is told of an update of weights that was made
    rank_times: tuple[RankTime, ...] = ()
    slots: DecodeSlots = field(default_factory=DecodeSlots)  # of the engine that it asks
    waits: EnvironmentWaits = field(default_factory=EnvironmentWaits)  # of its environments

    def result(self) -> Any:
        """Run it. Returns what the op gives; raises what it raises."""
        call = self.call
        place = call.place if call.op.external else None
        with counted_in(self.slots), waits_counted_in(self.waits):
            result = run_op(
                call.op,
                self.worker,
                self.arguments,
                call.into,
                call.info,
                place=place,
                journal=self._journal,
                notes=self.run.notes,
                warn=self.run.warn,
            )
        if call.worker is not None and call.op.updates == "weights":
            self.updated(call.worker, self.worker)
        return result

    def take_passes(self) -> Sequence[DecodePasses]:
        """Return how long passes of the engine took."""
        return take_passes(self.call.op, self.worker)

    def _journal(self) -> Journal:
        assert self.run.journal is not None, "a run has a journal for what touches the world"
        return self.run.journal
