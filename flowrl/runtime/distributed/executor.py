"""Workers on ranks: opened where the plan has them, called by the driver, and started again when they are lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...batch import Batch
from ...errors import RankLost
from ...graph.tracing.trace_records import HandleLike
from ...lowering.deployment import Deployment
from ...workers.engine import Engine, Published
from ...workers.headway import Headway, headway
from ...workers.model_options import Build, Model
from ..executor import PendingCall, RowsAgain, RunServices, open_copies
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.run_lock import began
from ..values.call import Call
from ..values.process_memory import MemoryProbe, ProcessMemory
from ..values.remote_batch import RemoteBatch, RemoteValue
from .calls.bring_rows import bring_rows, capture_rows
from .calls.pending_calls import start_call, to_remote
from .calls.streamed_calls import EngineOnRanks, StreamedCallOnRanks
from .open_groups import OpenGroups, Ranks, blueprint_of
from .protocol import Named, RankConfig
from .rank_client import RankClient
from .recovery import Recovery
from .worker_group import Staged, WorkerGroup


class DistributedExecutor(OpenGroups):
    """Opens workers on ranks, and runs their calls there: see :class:`flowrl.runtime.executor.Executor`.

    ``deployments`` by worker and whether it is the copy that generates, as
    :func:`~flowrl.lowering.deployment.replicas_apart` has them; ``pools`` the ranks of each pool. ``swapped`` are
    those, such as ``actor.train``, that leave the memory of their pool for others between their calls.
    ``patience``: the seconds in which a lost replica has to be started again, else the run goes on without it; None
    waits for it. ``least``: how many ranks of a pool have to be there; else one of replicas, and all of others.
    """

    def __init__(
        self,
        declared: Mapping[str, HandleLike],
        ranks: Ranks,
        *,
        deployments: Mapping[tuple[str, bool], Deployment],
        pools: Mapping[str, Sequence[int]],
        open_engine: Callable[[str, Build], Engine],
        open_tokenizer: Callable[[Model], Any],
        out: Path,
        seed: int = 0,
        deadline: float | None = None,
        staleness: int = 0,
        copies: int = 1,
        swapped: Container[str] = (),
        patience: float | None = None,
        least: Mapping[str, int] | None = None,
    ) -> None:
        blueprints = {name: blueprint_of(name, d) for name, d in declared.items()}
        config = RankConfig(blueprints, open_engine, open_tokenizer, str(out.resolve()), seed)
        client = RankClient(ranks, pools, deadline=deadline, staleness=staleness, copies=copies)
        super().__init__(declared, ranks, client, deployments, config, swapped)
        self.recovery = Recovery(self, patience=patience, least=least or {})
        self.run = RunServices()
        self._shared: dict[str, EngineOnRanks] = {}  # of copies that generate
        self._probe = MemoryProbe(children=False)  # ranks look at their own

    def attach(self, run: RunServices) -> None:
        """Use the services of a run from here on. Ranks have journals and notes of their own."""
        self.run = self.recovery.run = run
        self.client.warn, self.client.settle = run.warn, run.failed.note
        kept = self.client.copies - 1  # what the program still holds of a step that is committed is made of copies too
        run.on_commit.append(lambda step: self.client.lineage.settle(step - kept))
        run.on_commit.append(lambda step: self.recovery.take_up(self._unserved()))

    # -- workers ----------------------------------------------------------------------------------------------------

    def start_program(self, names: Iterable[str], *, resumed: bool) -> None:
        """Have optimizers and copies of other workers begin anew, unless resumed; offload who leaves memory."""
        if not resumed:
            self.begin_anew(names)
        self.start_ranks()  # also where a program has no worker
        if missing := self.began_without:
            self.began_without = {}
            texts = (f"pool '{pool}' begins with {n['ranks']} of {n['planned']} ranks" for pool, n in missing.items())
            self.run.on_resize("; ".join(texts), self.replicas())
        self.offload_swapped()
        self.client.lineage.settle(sys.maxsize)  # steps are counted from anew

    def begin_anew(self, names: Iterable[str]) -> None:
        """Have optimizers begin anew, and copies of other workers take their weights."""
        names = list(names)
        for name in names:
            self.workers[name].program_starts()
        for name in names:
            group, of = self.workers[name], self.workers[name].blueprint.arguments.get("of")
            if isinstance(of, Named) and group.is_model and group.blueprint.cls.copies_of:
                group.install(self.open(of.name).in_use(), group.version)

    # -- calls ------------------------------------------------------------------------------------------------------

    def start(self, call: Call, chunk: int, worker: WorkerGroup | None, arguments: Mapping[str, Any]) -> PendingCall:
        """Send a call to the ranks of its worker, or to where its rows are; returns what waits for it."""
        if call.streams and worker is not None:
            self.client.retry(worker.end_rows)  # ranks would end them as they begin, which a publish may hold up
            engine = self._share(worker)
            return StreamedCallOnRanks(self.client, call, worker, to_remote(arguments), engine, chunk)
        return start_call(self.client, call, worker, arguments)

    def engine_steps(self, name: str) -> dict[int, tuple[int, bool]]:
        """Return by rank how many steps its engine has made for calls that share it, and whether rows run."""
        engine = self._shared.get(name)
        if engine is None:
            return {}
        steps = dict(engine.steps)  # the thread of its pool goes on
        return {rank: (made, engine.samples(rank)) for rank, made in steps.items()}

    def hold_engines(self, name: str, steps: Mapping[int, int] | None) -> None:
        """Have the engines of a worker make no more than so many steps in all; None: as many as they like."""
        if name in self._shared:
            self._shared[name].most = steps

    def rows_begun_again(self, name: str) -> list[RowsAgain]:
        """Return, once, which rows of a worker its ranks have begun again, as they were lost in the midst of them."""
        engine = self._shared.get(name)
        return [] if engine is None else engine.take_again()

    def keep_open(self, name: str, parts: Collection[tuple[int, int, int]]) -> None:
        """Take no answer of these parts of a worker's calls, (rank, call, part), until they are begun again."""
        if name in self._shared:
            self._shared[name].open = parts

    def begin_rows_again(self, name: str, again: RowsAgain) -> None:
        """Have a rank begin rows again from some of the tokens that they have, as if it had been lost."""
        self._shared[name].begin_rows_again(again)

    def _unserved(self) -> list[str]:
        """Return the pools to which no weights are published: ranks that arrive there take part after any step."""
        served = {group.pool for group in self.servers.values()}
        return [pool for pool in self.client.pools if pool not in served]

    def choose_ranks(self, name: str, ranks: tuple[int, ...]) -> None:
        """Have the next prompt groups that finish one by one go to these ranks, one each."""
        self._share(self.servers[name] if name in self.servers else self.workers[name]).chosen.extend(ranks)

    def put(self, value: Any) -> Any:
        """Return rows of the driver as calls take them: each rank gets those that it needs with its call."""
        return RemoteBatch.drawn(value) if isinstance(value, Batch) else value

    def get(self, value: Any) -> Any:
        """Return rows that lie on ranks, brought here; counted as records."""
        return bring_rows(self.client, value) if isinstance(value, RemoteValue) else value

    # -- weights, memory and state ----------------------------------------------------------------------------------

    def stage(self, name: str) -> Staged:
        """Copy a worker's weights as they are now, on the ranks where they are."""
        return self.workers[name].stage()

    def _share(self, group: WorkerGroup) -> EngineOnRanks:
        """Return the engines of a worker's ranks, for calls side by side."""
        found = self._shared.get(group.name)
        if found is None:
            found = self._shared[group.name] = EngineOnRanks(self.client, group, lambda text: self.run.on_kept(text))
        return found

    def install(self, name: str, version: int, weights: Staged | None = None, *, keep_cache: bool = False) -> int:
        """Give the copy that generates ``weights`` that were staged, or those that the worker has. Returns the bytes
        that its ranks have received."""
        given = self.workers[name].in_use() if weights is None else weights
        self.recovery.take_up([self.servers[name].pool])
        return self.servers[name].install(given, version, keep_cache=keep_cache)

    def published(self, name: str) -> Published | None:
        """Return what the engines that generate said of the weights that they were last given."""
        return self.servers[name].published

    def offload(self, resident: str, forecast: float | None = None) -> None:
        """Take weights and optimizer of a worker out of its devices' memory; note the bytes, and the plan's."""
        group = self.resident(resident)
        self.client.note_swap("offload", group.pool, resident, group.offload(), forecast)

    def onload(self, resident: str, forecast: float | None = None) -> None:
        """Bring them back; note the bytes, and the plan's."""
        group = self.resident(resident)
        self.client.note_swap("onload", group.pool, resident, group.onload(), forecast)

    def capture(
        self, folder: Path, manifest: Mapping[str, Any], live: Mapping[int, Any], *, after: int = -1
    ) -> checkpoint.Begun:
        """Begin a checkpoint: each rank copies its part of the workers' state and of the values.

        All calls are done: those to come have their answers in the parts of the journals that it names.
        """
        begun = checkpoint.begin(
            folder,
            {**manifest, "expected_lengths": self.client.expected.to_json()},
            open_copies(self),
            live,
            capture_state=lambda part, name, group: group.capture_state(part, name),
            capture_rows=lambda value, file: capture_rows(self.client, value, file),
            after=after,
        )
        self.client.journal_since = manifest.get("journal", {})
        return begun

    def sync(self) -> None:
        """Have the disk hold all journals: the run's, and those of the ranks."""
        if self.run.journal is not None:
            self.run.journal.sync()
        self.client.call_all(self.client.all_ranks, "sync", what="writing the journals to disk")

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Take back how long the responses to prompts were, and where journals were, at this checkpoint."""
        self.client.journal_since = manifest.get("journal", {})
        self.client.expected.restore(manifest.get("expected_lengths", {}))

    def recover(self, lost: RankLost) -> None:
        """Start lost ranks again, without their state. Raises ``lost`` where it names none."""
        self._shared.clear()
        self.recovery.restart_empty(lost)

    def reset(self) -> None:
        """Close all workers, to be opened as they were made."""
        self._shared.clear()
        super().reset()

    def close(self) -> None:
        """End all ranks."""
        self._shared.clear()
        super().close()

    def unanswered(self) -> list[dict[str, Any]]:
        """Return what ranks were asked and have not answered yet, with the process of each."""
        where = self.client.link.where
        found: list[dict[str, Any]] = []
        for asked in self.client.asked():
            for rank in asked.ranks:
                there = where.get(rank, {})
                pid = there.get("pid", 0)
                said = {"rank": rank, "pool": self.client.pool_of(rank), "pid": pid, "node": str(there.get("node", ""))}
                more = {"what": asked.what, "since": asked.since, "deadline": asked.deadline}
                found.append({**said, "began": began(pid) if pid else "", **more})
        return found

    def headway(self) -> Mapping[str, Headway]:
        """Return how far the driver has come, and the ranks that answer."""
        return {"driver": headway(), **{f"rank {rank}": found for rank, found in self.client.link.headway().items()}}

    def memory(self) -> Mapping[str, ProcessMemory]:
        """Return the memory of the driver, and what each rank had when it answered last."""
        known = dict(self.client.memory)  # ranks that are gone for good are taken out by the thread that finds it
        return {"driver": self._probe.look(), **{f"rank {rank}": known[rank] for rank in sorted(known)}}

    def record(self) -> Mapping[str, Any]:
        """Return the bytes that moved, and where the ranks are."""
        return {
            "traffic": vars(self.client.traffic),
            "publishes": list(self.client.moves),
            "swaps": list(self.client.swaps),
            "replicas": self.replicas(),
            **self.ranks.record(),
        }
