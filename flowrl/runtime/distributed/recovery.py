"""Lost ranks are started again: within a program with the state that they had, or else for a checkpoint to give it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import RankLost
from ..executor import RunServices
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.damage import damaged_files
from .open_groups import OpenGroups
from .rank_client import RankClient
from .worker_group import WorkerGroup, loaded


@dataclass(frozen=True)
class _State:
    """Where a rank that is started anew gets a worker's state from: a group, a checkpoint, or else as it is opened."""

    group: WorkerGroup | None = None
    checkpoint: Path | None = None


class Recovery:
    """Starts ranks of ``groups`` again. A run that has to go back to a checkpoint gets that said as RankLost."""

    def __init__(self, groups: OpenGroups) -> None:
        self.groups, self.client = groups, groups.client
        self.run = RunServices()
        self._inconsistent: set[int] = set()  # ranks whose restart within a program did not come to its end
        self.client.restart = self.restart_in_place

    def restart_in_place(self, lost: RankLost) -> list[int]:
        """Restart lost ranks and restore their state in place; returns the restarted ranks.

        Raises ``lost`` where that state went with them: then the run has to go back to a checkpoint.
        """
        groups, client = self.groups, self.client
        pools = {client.pool_of(rank) for rank in lost.ranks}
        fallen = [
            rank
            for pool in pools
            for rank in client.pools[pool]
            if rank in lost.ranks or pool in groups.joined  # who computes together starts together
        ]
        hit = [g for g in groups.all_groups() if not set(g.ranks).isdisjoint(fallen)]
        states = [self._find_state(group, fallen) for group in hit]
        if self._inconsistent or not fallen or None in states:
            raise lost
        self.run.on_loss(lost)
        try:
            groups.restart_ranks(fallen)
            client.forget_ranks(fallen)
            for pool in pools & groups.joined:
                groups.joined.discard(pool)
                groups.join_pool(pool)
            for group, state in zip(hit, states, strict=True):
                assert state is not None, "all of them have one"
                self._open_again(group, [r for r in group.ranks if r in fallen], state)
        except Exception as error:
            again = error if isinstance(error, RankLost) else RankLost(f"ranks could not be renewed: {error}")
            again.ranks, again.inconsistent = tuple({*fallen, *again.ranks}), True
            self._inconsistent |= set(again.ranks)
            raise again from (None if again is error else error)
        self.run.on_restart(f"rank{'s' if len(fallen) > 1 else ''} {', '.join(map(str, fallen))}")
        return fallen

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
        if alive and group.is_model and not group.spec.collective:  # each of them has all
            return _State(group.part(alive))
        trained = self.groups.workers.get(group.name) if group.spec.serving else None
        if trained is not None and set(trained.ranks).isdisjoint(fallen):
            settled = not trained.changing and not trained.swapping and not trained.dirty
            if settled and trained.version == group.version:
                return _State(trained)
        folder = checkpoint.latest(self.groups.folder / "checkpoints")
        if folder is not None and checkpoint.load_manifest(folder)["stamps"].get(group.title) == group.stamp:
            return None if damaged_files(folder, group.title) else _State(checkpoint=folder)
        return None

    def _open_again(self, group: WorkerGroup, ranks: Sequence[int], state: _State) -> None:
        """Open a worker on ranks that were started anew, and give it its state."""
        group.opened(self.client.call_all(ranks, "open", group.spec, what=f"opening {group.title} again"))
        new = group.part(ranks)
        new.is_away = False
        if state.group is not None:
            new.take(state.group.in_use(), state.group.version)
            self.client.routes.drop(state.group, new)
        elif state.checkpoint is not None:
            new.load_state(state.checkpoint, group.title)
        group.stamps |= new.stamps
        if group.is_away:
            new.offload()

    def restart_empty(self, lost: RankLost) -> None:
        """Restart the pools of lost ranks, where they are not alive, and have all others forget the rows they hold.

        The workers of other pools stay open; they take back their state from the checkpoint. Raises ``lost`` where it
        names no ranks.
        """
        if not lost.ranks:
            raise lost
        groups, client = self.groups, self.client
        pools = {client.pool_of(rank) for rank in {*(() if lost.alive else lost.ranks), *self._inconsistent}}
        self._inconsistent = set()
        dead = [rank for pool in pools for rank in client.pools[pool]]
        groups.joined -= pools  # all of this is forgotten first: others may die while these are started
        client.forget()
        groups.forget_groups(dead)
        if dead:
            groups.restart_ranks(dead)
        client.call_all([rank for rank in client.all_ranks if rank not in dead], "forget")


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
        calls = recipe.calls_for(id)
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
        client.traffic.between += client.wait(client.send("keep_copy", {rank: (copy, id)}), what)[rank]
    except RankLost:
        raise
    except Exception as error:
        raise RankLost(f"{what}, did not come: {error}", ranks=[rank], inconsistent=True) from error
    client.lineage.note_remade({id: rank})
