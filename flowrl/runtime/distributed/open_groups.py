"""The workers that are open on ranks: which group of ranks has which, and the pools that compute together."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import FlowError, RankLost, WorkerError
from ...graph.stand_ins.argument_trees import rebuild
from ...graph.stand_ins.values import is_handle
from ...graph.tracing.trace_records import HandleLike
from ...lowering.deployment import Deployment
from ..transfer.rendezvous import forget_meetings
from .protocol import Blueprint, Named, RankConfig
from .rank_client import Link, RankClient
from .worker_group import WorkerGroup


class Ranks(Link, Protocol):
    """Processes that can be started: which gives a :class:`~flowrl.runtime.distributed.rank_client.Link` to them."""

    def start(self, config: RankConfig) -> None: ...
    def restart(self, ranks: Sequence[int]) -> None: ...
    def stop(self) -> None: ...
    def record(self) -> dict[str, Any]: ...


class OpenGroups:
    """Opens workers on ranks. ``deployments`` say where, by worker and whether it is the copy that generates.

    ``swapped`` are those, such as ``actor.train``, that leave the memory of their pool for others between their calls.
    ``joined`` are the pools whose ranks have a process group. ``warn`` is told what ranks say as they open a worker.
    """

    def __init__(
        self,
        declared: Mapping[str, HandleLike],
        ranks: Ranks,
        client: RankClient,
        deployments: Mapping[tuple[str, bool], Deployment],
        config: RankConfig,
        swapped: Container[str],
    ) -> None:
        self.declared, self.ranks, self.client, self.deployments = declared, ranks, client, deployments
        self.config, self.swapped, self.folder = config, swapped, Path(config.folder)
        self.workers: dict[str, WorkerGroup] = {}
        self.servers: dict[str, WorkerGroup] = {}
        self.joined: set[str] = set()
        self._started = False
        self._tokenizers = config.tokenizers()

    def open(self, name: str) -> WorkerGroup:
        """Return the worker of that name; opens it on its ranks the first time."""
        if name not in self.workers:
            self.workers[name] = self._open(name, serving=False)
        return self.workers[name]

    def open_server(self, name: str) -> WorkerGroup:
        """Return the copy of a worker that generates; opens it the first time, with the weights of the trained one."""
        if name not in self.servers:
            trained = self.open(name)
            server = self.servers[name] = self._open(name, serving=True)
            try:
                server.install(trained.in_use(), trained.version)
            except BaseException:
                del self.servers[name]
                raise
        return self.servers[name]

    def all_groups(self) -> Iterator[WorkerGroup]:
        """Yield all groups that are open."""
        yield from (*self.workers.values(), *self.servers.values())

    def _open(self, name: str, *, serving: bool) -> WorkerGroup:
        deployment = self.deployments[name, serving]
        self.start_ranks()
        ranks = self.client.pools[deployment.pool]
        self.join_pool(deployment.pool)
        group = WorkerGroup(self.client, self.config.blueprints[name], deployment.spec, ranks, deployment.shares)
        at = self.declared[name].at
        try:
            answers = self.client.call_all(ranks, "open", deployment.spec, what=f"opening {name}")
        except RankLost:
            raise
        except FlowError as error:
            error.at = error.at or at
            raise
        except Exception as error:
            raise WorkerError(f"worker '{name}' could not be opened: {error}", at=at) from error
        group.version = answers[ranks[0]]["version"]
        group.opened(answers)
        group.born = group.stamp
        for text in dict.fromkeys(text for answer in answers.values() for text in answer["warnings"]):
            self.client.warn(text)
        if f"{name}.{'generate' if serving else 'train'}" in self.swapped:
            group.offload()
        return group

    def resident(self, name: str) -> WorkerGroup:
        """Return the group behind what a memory holds: ``actor.train``, ``actor.generate``."""
        worker, _, use = name.rpartition(".")
        return self.servers.get(worker, self.workers[worker]) if use == "generate" else self.workers[worker]

    def offload_swapped(self) -> None:
        """Offload every swapped worker, as the schedule of a program takes for granted where it begins."""
        for groups, use in ((self.workers, "train"), (self.servers, "generate")):
            for name, group in groups.items():
                if f"{name}.{use}" in self.swapped:
                    group.offload()

    # -- processes --------------------------------------------------------------------------------------------------

    def start_ranks(self) -> None:
        """Start the ranks, if they are not there yet."""
        if not self._started:
            self._started = True
            forget_meetings(self.folder)
            self.ranks.start(self.config)
            self._write_where()

    def restart_ranks(self, ranks: Sequence[int]) -> None:
        """Start some of them anew, without any worker."""
        self.ranks.restart(ranks)
        self._write_where()

    def _write_where(self) -> None:
        """Write which rank is which process, for whoever looks after them: ``ranks.json``."""
        text = json.dumps({str(rank): where for rank, where in sorted(self.ranks.where.items())}, indent=1)
        (self.folder / "ranks.json").write_text(text)

    def join_pool(self, pool: str) -> None:
        """Have the ranks of a pool whose models compute together form a process group."""
        if pool in self.joined or not any(d.pool == pool and d.spec.collective for d in self.deployments.values()):
            return
        ranks = self.client.pools[pool]
        meeting = self.client.call_all(ranks[:1], "meeting_point")[ranks[0]]
        seconds = (self.client.deadline or 1740.0) + 60  # the driver is the first to find that a rank hangs
        sent = self.client.send("join_pool", {r: (len(ranks), n, meeting, seconds) for n, r in enumerate(ranks)})
        self.client.wait(sent, f"joining the ranks of pool '{pool}'")
        self.joined.add(pool)

    def forget_groups(self, ranks: Collection[int]) -> None:
        """Forget the groups on ranks that were started anew, and weights that any has set aside."""
        for groups in (self.workers, self.servers):
            for name, group in list(groups.items()):
                group.aside.clear()
                if group.ranks[0] in ranks:
                    del groups[name]

    def reset(self) -> None:
        """Close all workers, to be opened as they were made."""
        self.client.call_all(self.client.all_ranks, "close_workers")
        self.client.forget()
        self.workers.clear()
        self.servers.clear()

    def close(self) -> None:
        """End all ranks."""
        self.workers.clear()
        self.servers.clear()
        if self._started:
            self.ranks.stop()
            self._started = False
            forget_meetings(self.folder)

    def tokenizer(self, said: Any) -> Any:
        """Return the tokenizer of a handle, a function, a name or a folder, in the driver; of the actor for None."""
        return self._tokenizers.find(said)


def blueprint_of(name: str, declared: HandleLike) -> Blueprint:
    """Return a worker as it travels: its arguments have names in the place of handles."""

    def to_name(item: Any) -> Any:
        return Named(item.name) if is_handle(item) else item

    args, kwargs, arguments = rebuild((declared.args, dict(declared.kwargs), dict(declared.arguments)), to_name)
    return Blueprint(name, declared.cls, args, kwargs, arguments)
