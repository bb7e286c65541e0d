"""Lost ranks are started again: within a program with the state that they had, or else for a checkpoint to give it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import RankLost
from ..executor import RunServices
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.damage import damaged_files
from .open_groups import OpenGroups
from .rank_client import RankClient
from .worker_group import Staged, WorkerGroup, loaded


@dataclass(frozen=True)
class _State:
    """Where a rank that is started anew gets a worker's state from: weights and their version, a checkpoint, or else as
    it is opened."""

    weights: tuple[Staged, int] | None = None
    checkpoint: Path | None = None

    @staticmethod
    def of(group: WorkerGroup) -> _State:
        """Return that of a group as it is."""
        return _State((group.in_use(), group.version))


class Recovery:
    """Starts ranks of ``groups`` again. A run that has to go back to a checkpoint gets that said as RankLost.

    ``patience``: the seconds in which a replica has to be there again, else the run goes on with the others of its
    pool; None waits for all. ``least``: how many ranks of a pool have to be there; else one.
    """

    def __init__(
        self, groups: OpenGroups, *, patience: float | None = None, least: Mapping[str, int] | None = None
    ) -> None:
        self.groups, self.client, self.patience, self.least = groups, groups.client, patience, least or {}
        self._arrived: dict[int, str] = {}  # ranks that do not take part yet, with their pools
        self.run = RunServices()
        self._inconsistent: set[int] = set()  # ranks whose restart within a program did not come to its end
        self.client.restart = self.restart_in_place

    def restart_in_place(self, lost: RankLost) -> list[int]:
        """Restart lost ranks and restore their state in place; returns the restarted ranks.

        Raises ``lost`` where that state went with them: then the run has to go back to a checkpoint.
        """
        groups, client = self.groups, self.client
        pools = {client.pool_of(rank) for rank in lost.ranks} & client.pools.keys()
        teams = {other for rank in lost.ranks for other in (groups.team_of(rank) if rank in groups.joined else (rank,))}
        fallen = [rank for pool in pools for rank in client.pools[pool] if rank in teams]
        hit = [g for g in groups.all_groups() if not set(g.ranks).isdisjoint(fallen)]
        states = [self._find_state(group, fallen) for group in hit]
        if self._inconsistent or not fallen or None in states:
            raise lost
        self.run.on_loss(lost)
        gone: list[int] = []
        try:
            gone = self._restart(fallen, lost.ranks)
            client.forget_ranks(fallen)
            for server in groups.servers.values():
                server.forget_kept(fallen)
            torn = {pool for pool in pools if not groups.joined.isdisjoint(client.pools[pool])}
            groups.joined -= set(fallen)
            for pool in torn:
                groups.join_teams(pool)
            for group, state in zip(hit, states, strict=True):
                assert state is not None, "all of them have one"
                if new := [r for r in group.ranks if r in fallen]:
                    self._open_again(group, new, state)
        except Exception as error:
            again = error if isinstance(error, RankLost) else RankLost(f"ranks could not be renewed: {error}")
            again.ranks, again.inconsistent = tuple({*fallen, *again.ranks}), True
            self._inconsistent |= set(again.ranks)
            raise again from (None if again is error else error)
        if back := [rank for rank in fallen if rank not in gone]:
            self.run.on_restart(_listed(back))
        return fallen

    def _restart(self, fallen: Sequence[int], lost: Collection[int]) -> list[int]:
        """Start ranks again; go on without replicas among the ``lost`` that are not there in time, and return them.

        Who has to be there is waited for as long as it takes to be started.
        """
        groups, client = self.groups, self.client
        spare = self._spare(lost)
        needed = [rank for rank in fallen if rank not in spare]
        if needed:
            groups.restart_ranks(needed)
        late = groups.restart_ranks(spare, self.patience) if spare else []
        gone = [rank for rank in spare if not set(groups.team_of(rank)).isdisjoint(late)]  # whole teams
        if gone:
            pools = {rank: client.pool_of(rank) for rank in gone}
            groups.drop_ranks(gone)
            for pool in dict.fromkeys(pools.values()):
                mine, left = [rank for rank in gone if pools[rank] == pool], len(client.pools[pool])
                why = f"{_listed(mine)} could not be started again within {self.patience:g} s"
                self.run.on_resize(f"pool '{pool}' goes on with {_count(left)}: {why}", groups.replicas())
        return gone

    def _spare(self, lost: Collection[int]) -> list[int]:
        """Return the lost ranks without which their pools could go on."""
        groups, client = self.groups, self.client
        if self.patience is None:
            return []
        found: list[int] = []
        stateful = {group.ranks[0] for group in groups.all_groups() if group.stateful}  # it alone has the state
        for pool, ranks in client.pools.items():
            mine = [rank for rank in ranks if not set(groups.team_of(rank)).isdisjoint(lost)]
            left = len(ranks) - len(mine)
            if (
                mine
                and left >= max(1, self.least.get(pool, 1))
                and groups.can_shrink(pool)
                and stateful.isdisjoint(mine)
            ):
                found += mine
        return found

    def _find_state(self, group: WorkerGroup, fallen: Collection[int]) -> _State | None:
        """Return where ranks of a group that are started anew get its state from; None where nobody has it any more."""
        alive = [rank for rank in group.ranks if rank not in fallen]
        group.owed = group.installing
        if group.changing or group.swapping:
            return None
        if group.stamp == group.born or group.installing:  # as it was opened, or about to be given weights
            return _State()
        if group.aside:
            return None
        if alive and group.is_model:  # each of them has all, or each team: who is lost with it has fallen too
            return _State.of(group.part(alive))
        trained = self.groups.workers.get(group.name) if group.spec.serving else None
        if trained is not None and set(trained.ranks).isdisjoint(fallen):
            settled = not trained.changing and not trained.swapping and not trained.dirty
            if settled and trained.version == group.version:
                return _State.of(trained)
        group.forget_kept(fallen)
        if group.kept is not None and group.kept[1] == group.version:
            return _State(group.kept)
        folder = checkpoint.latest(self.groups.folder / "checkpoints")
        if folder is not None and checkpoint.load_manifest(folder)["stamps"].get(group.title) == group.stamp:
            return None if damaged_files(folder, group.title) else _State(checkpoint=folder)
        return None

    def _open_again(self, group: WorkerGroup, ranks: Sequence[int], state: _State) -> None:
        """Open a worker on ranks that were started anew, and give it its state."""
        group.opened(self.client.call_all(ranks, "open", group.spec, what=f"opening {group.title} again"))
        new = group.part(ranks)
        new.is_away = False
        if state.weights is not None:
            weights, version = state.weights
            new.take(weights, version)
            self.client.routes.drop(weights.group, new)
        elif state.checkpoint is not None:
            new.load_state(state.checkpoint, group.title)
        group.stamps |= new.stamps
        if group.is_away:
            new.offload()

    def take_up(self, pools: Collection[str]) -> None:
        """Have ranks that have arrived for these pools take part from here on, with the state of the others there.

        One whose state cannot be had yet takes part later; one that fails is given up, and said.
        """
        with self.client.order:
            self._arrived |= self.groups.arrived()
            for pool in pools:
                for team in self._teams_there(pool):
                    self._take_up(team, pool)

    def _teams_there(self, pool: str) -> list[tuple[int, ...]]:
        """Return ranks that have arrived for a pool, as many as compute together in it, of one machine."""
        size, nodes = self.groups.team_size(pool), defaultdict[str, list[int]](list)
        for rank, its in self._arrived.items():
            if its == pool:
                nodes[self.client.link.where[rank]["node"]].append(rank)
        return [tuple(ranks[n : n + size]) for ranks in nodes.values() for n in range(0, len(ranks) - size + 1, size)]

    def _take_up(self, team: Sequence[int], pool: str) -> None:
        groups, client = self.groups, self.client
        hit = [group for group in groups.all_groups() if group.pool == pool]
        if any(group.changing or group.swapping or group.installing for group in hit):
            return
        try:
            groups.add_team(pool, team)
            for group in hit:
                fresh = group.stamp == group.born or not group.is_model
                self._open_again(group, team, _State() if fresh else _State.of(group.part(group.ranks)))
        except Exception as error:
            groups.remove_team(pool, team)
            if isinstance(error, RankLost) and not set(team) & set(error.ranks):
                return  # another one is lost, which whoever needs it finds
            self.run.warn(f"{_listed(team)} came to pool '{pool}', and could not take part: {error}")
            for rank in team:
                del self._arrived[rank]
                groups.ranks.give_up(rank)
            return
        for rank in team:
            del self._arrived[rank]
        for group in hit:
            group.join(team)
        client.pools[pool] = (*client.pools[pool], *team)
        size = groups.replicas().get(pool)
        there = f"{size['ranks']} of {size['planned']} ranks" if size else "all its ranks"
        come = "has come" if len(team) == 1 else "have come"
        self.run.on_resize(f"pool '{pool}' has {there}: {_listed(team)} {come}", groups.replicas())

    def restart_empty(self, lost: RankLost) -> None:
        """Restart the pools of lost ranks, where they are not alive, and have all others forget the rows they hold.

        The workers of other pools stay open; they take back their state from the checkpoint. Raises ``lost`` where it
        names no ranks.
        """
        if not lost.ranks:
            raise lost
        groups, client = self.groups, self.client
        inconsistent, self._inconsistent = self._inconsistent, set()
        pools = {client.pool_of(rank) for rank in {*(() if lost.alive else lost.ranks), *inconsistent}}
        pools &= client.pools.keys()
        dead = [rank for pool in pools for rank in client.pools[pool]]
        groups.joined -= set(dead)  # all of this is forgotten first: others may die while these are started
        client.forget()
        groups.forget_groups(dead)
        if dead:
            self._restart(dead, {*lost.ranks, *inconsistent} & set(dead))
        client.call_all([rank for rank in client.all_ranks if rank not in dead], "forget")


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def remake_rows(client: RankClient, wanted: Any) -> None:
    """Have lost rows that arguments ask for brought from their copies, or made again by the same calls.

    Raises RankLost where neither can be.
    """
    for rank, id in client.lineage.missing(wanted):
        if (copy := client.lineage.copy_of(id)) is not None:
            _bring_copy(client, rank, id, copy)
            continue
        recipe = client.lineage.recipe_of(id)
        if recipe is None or not recipe.repeatable:
            what = f"rows that rank {rank} held are needed, and cannot be made again."
            raise RankLost(what, ranks=[rank], inconsistent=True, alive=True)
        calls = {r: replace(call, epoch=client.epoch) for r, call in recipe.calls_for(id).items()}
        remake_rows(client, [dict(call.arguments) for call in calls.values()])
        what = f"{recipe.title} of step {recipe.step}, once more"
        try:
            with loaded(*recipe.stamps):
                answers = client.wait(client.send("run", {r: (call,) for r, call in calls.items()}), what)
        except RankLost:
            raise
        except Exception as error:  # such as memory that is not there beside others
            raise RankLost(f"{what} failed: {error}", ranks=[rank], inconsistent=True) from error
        for r, reply in answers.items():
            if recipe.checks.get(calls[r].keep, reply.check) != reply.check:
                what = f"{recipe.title} gave other rows when rank {r} made them again."
                raise RankLost(what, ranks=[r], inconsistent=True, alive=True)
        client.lineage.note_remade({call.keep: r for r, call in calls.items()})


def _bring_copy(client: RankClient, rank: int, id: int, copy: int) -> None:
    """Have a rank take back an object of which another one has a copy. Raises RankLost."""
    what = f"rows that rank {rank} held, from rank {copy}"
    try:
        client.traffic.add(between=client.wait(client.send("keep_copy", {rank: (copy, id)}), what)[rank])
    except RankLost:
        raise
    except Exception as error:
        raise RankLost(f"{what}, did not come: {error}", ranks=[rank], inconsistent=True) from error
    client.lineage.note_remade({id: rank})
