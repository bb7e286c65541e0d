"""The workers that are open on ranks: which group of ranks has which, and the pools that compute together."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import FlowError, ModelError, RankLost, WorkerError
from ...graph.stand_ins.argument_trees import rebuild
from ...graph.stand_ins.values import is_handle
from ...graph.tracing.trace_records import HandleLike
from ...lowering.deployment import Deployment, teams_of
from ..storage.wait_record import RESTART
from ..transfer.rendezvous import forget_meetings, leave_sign
from .protocol import Blueprint, Named, RankConfig
from .rank_client import Link, RankClient
from .rank_parts import RankParts
from .worker_group import WorkerGroup


class Ranks(Link, Protocol):
    """Processes that can be started: which gives a :class:`~flowrl.runtime.distributed.rank_client.Link` to them.

    ``start`` returns the ranks that are not there, of pools that begin with fewer; ``arrived`` those that have come
    since it was asked last, with their pools: they have numbers of their own. ``give_up`` ends one of these.
    ``restart`` ends ranks and starts them anew; returns those that are not there ``within`` so many seconds, None for
    all the time that it takes. ``take_over`` is told by rank who stands in for one that is gone for good.
    """

    def start(self, config: RankConfig) -> list[int]: ...
    def arrived(self) -> dict[int, str]: ...
    def give_up(self, rank: int) -> None: ...
    def restart(self, ranks: Sequence[int], within: float | None = None) -> list[int]: ...
    def take_over(self, stand_ins: Mapping[int, int]) -> None: ...
    def stop(self) -> None: ...
    def record(self) -> dict[str, Any]: ...


class OpenGroups:
    """Opens workers on ranks. ``deployments`` say where, by worker and whether it is the copy that generates.

    ``swapped`` are those, such as ``actor.train``, that leave the memory of their pool for others between their calls.
    ``teams`` are the ranks of each pool that compute together, and ``joined`` those that have their process group.
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
        self.teams: dict[str, list[tuple[int, ...]]] = {}
        for pool, there in client.pools.items():
            if teams := teams_of(deployments, pool):
                self.teams[pool] = [tuple(there[place] for place in team) for team in teams]
        self.joined: set[int] = set()
        self.began_without: dict[str, dict[str, int]] = {}  # pools that began with fewer ranks, until that is said
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
            keeps = self.client.copies > 1 and set(server.ranks).isdisjoint(trained.ranks)
            try:
                server.install(trained.stage() if keeps else trained.in_use(), trained.version)
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
        self.join_teams(deployment.pool)
        shares, spec = deployment.shares, deployment.spec
        if len(ranks) != len(shares):  # replicas, of which some are gone
            number = {rank: n for n, team in enumerate(self.teams.get(deployment.pool, ())) for rank in team}
            shares = tuple(number[rank] for rank in ranks) if spec.collective else tuple(range(len(ranks)))
        parts = RankParts(ranks, shares, spec.size)
        group = WorkerGroup(self.client, self.config.blueprints[name], spec, parts)
        at = self.declared[name].at
        try:
            answers = self.client.call_all(ranks, "open", spec, what=f"opening {name}")
        except RankLost:
            raise
        except FlowError as error:
            error.at = error.at or (self.declared[name].model_at if isinstance(error, ModelError) else at)
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
            missing = self.ranks.start(replace(self.config, sign=leave_sign(self.folder)))
            for pool, ranks in self.client.pools.items():
                self.client.pools[pool] = tuple(rank for rank in ranks if rank not in missing)
            for pool, teams in self.teams.items():
                self.teams[pool] = [team for team in teams if team[0] not in missing]
            self.began_without = self.replicas()
            self._write_where()

    def restart_ranks(self, ranks: Sequence[int], within: float | None = None) -> list[int]:
        """Start some of them anew, without any worker. Returns those that are not there ``within`` so many seconds."""
        with self.client.asking(RESTART, ranks, within):
            late = self.ranks.restart(ranks, within)
        self._write_where()
        return late

    def drop_ranks(self, gone: Collection[int]) -> None:
        """Go on without ranks that cannot be started again, all of a team: others of their pools stand in for them."""
        stand_ins: dict[int, int] = {}
        for pool, ranks in self.client.pools.items():
            teams = list(dict.fromkeys(map(self.team_of, ranks)))
            left = [team for team in teams if team[0] not in gone]
            for number, team in enumerate(team for team in teams if team not in left):
                stand_ins |= zip(team, left[number % len(left)], strict=True)
            if pool in self.teams:
                self.teams[pool] = left
        self.joined -= stand_ins.keys()
        for group in self.all_groups():
            if not stand_ins.keys().isdisjoint(group.ranks):
                group.leave(stand_ins)
        self.client.take_over(stand_ins)
        self.ranks.take_over(stand_ins)
        self._write_where()

    def arrived(self) -> dict[int, str]:
        """Return ranks that have arrived since this was asked last, with their pools."""
        found = self.ranks.arrived() if self._started else {}
        if found:
            self._write_where()
        return found

    def replicas(self) -> dict[str, dict[str, int]]:
        """Return how many ranks there are, and how many are planned, of pools that are not whole."""
        planned = {d.pool: len(d.shares) for d in self.deployments.values()}
        sizes = {pool: (len(self.client.pools[pool]), planned[pool]) for pool in planned}
        return {pool: {"ranks": n, "planned": of} for pool, (n, of) in sizes.items() if n != of}

    def can_shrink(self, pool: str) -> bool:
        """Whether a pool has replicas, of which some may be gone: each rank or team has all of every worker."""
        return len(teams_of(self.deployments, pool)) != 1

    def _write_where(self) -> None:
        """Write which rank is which process, for whoever looks after them: ``ranks.json``."""
        text = json.dumps({str(rank): where for rank, where in sorted(self.ranks.where.items())}, indent=1)
        (self.folder / "ranks.json").write_text(text)

    def team_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute together with one, which start together; it alone, where there are none."""
        return next((team for teams in self.teams.values() for team in teams if rank in team), (rank,))

    def team_size(self, pool: str) -> int:
        """Return how many ranks of a pool compute together."""
        return len(self.teams[pool][0]) if pool in self.teams else 1

    def add_team(self, pool: str, team: Sequence[int]) -> None:
        """Have ranks that have come to a pool form a process group, where its ranks have one."""
        if pool in self.teams:
            self.teams[pool].append(tuple(team))
            self.join_teams(pool)

    def remove_team(self, pool: str, team: Sequence[int]) -> None:
        """Forget a team that has come and does not take part."""
        if pool in self.teams:
            self.teams[pool] = [each for each in self.teams[pool] if each != tuple(team)]
            self.joined -= set(team)

    def join_teams(self, pool: str) -> None:
        """Have the ranks of a pool whose models compute together form process groups, those that have none."""
        teams = [team for team in self.teams.get(pool, ()) if self.joined.isdisjoint(team)]
        if not teams:
            return
        meetings = self.client.call_all([team[0] for team in teams], "meeting_point")
        seconds = (self.client.deadline or 1740.0) + 60  # the driver is the first to find that a rank hangs
        words = {r: (len(t), n, meetings[t[0]], seconds) for t in teams for n, r in enumerate(t)}
        self.client.wait(self.client.send("join_team", words), f"joining the ranks of pool '{pool}'")
        self.joined |= words.keys()

    def forget_groups(self, ranks: Collection[int]) -> None:
        """Forget the groups on ranks that were started anew, and what any was at: weights that it has set aside, and
        changes whose end nobody has waited for."""
        for groups in (self.workers, self.servers):
            for name, group in list(groups.items()):
                group.aside.clear()
                group.changing = group.swapping = group.installing = False
                group.kept = None
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
