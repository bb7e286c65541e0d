"""Ranks on Ray, an actor for each: started where the cluster has room, started again, awaited, told of each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....errors import ClusterLost, RankLost, RunError
from ....workers.headway import Headway
from ..protocol import Failed, RankConfig
from .cluster_room import ClusterRoom, PoolOfRanks
from .own_modules import own_modules
from .rank_actor import RankActor, start, threads_of
from .rank_answers import SILENT, RankAnswers
from .ray_head import check_head

SECONDS_TO_START = 600.0
SECONDS_TO_LOOK = 5.0  # at the start, for room for ranks that may be missing
TRIES = 3  # of a rank that comes and fails


class RayRanks:
    """The ranks of a run. ``address``: of a running cluster, ``auto`` for the one of this machine; None starts one.

    Modules of the user's that are nowhere installed travel by value.
    """

    def __init__(self, pools: Sequence[PoolOfRanks], *, address: str | None = None) -> None:
        self.pools, self.address = tuple(pools), address
        self.handles: dict[int, Any] = {}
        self.where: dict[int, dict[str, Any]] = {}
        self._room = ClusterRoom(self.pools, address)
        self._config: Any = None
        self._folder = ""
        self._places: dict[int, tuple[PoolOfRanks, int]] = {
            rank: (pool, place) for pool in self.pools for place, rank in enumerate(pool.ranks)
        }
        self._stand_ins: dict[int, int] = {}  # of ranks that are gone for good
        self._numbers = itertools.count(1 + max(self._places, default=0))
        self._awaited: dict[int, tuple[Any, Any]] = {}  # ranks for which there was no room yet: answer to come, handle
        self._failed: dict[tuple[str, int], int] = {}  # by pool and place: how often one has come and failed
        self._restarts = 0
        self._answers = RankAnswers(self.handles, lambda rank: self._places[rank][0].name)

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self, config: RankConfig) -> list[int]:
        """Join or start the cluster, place the pools and start their ranks.

        Returns those for which there is no room, of pools that begin with fewer; they are awaited.
        """
        self._room.connect()
        for module in own_modules():
            cloudpickle.register_pickle_by_value(module)
        self._config, self._folder = ray.put(config), config.folder
        for pool in sorted(self.pools, key=lambda pool: not pool.gpus):  # processes leave the cores beside GPUs alone
            self._room.reserve(pool)
        more = [rank for rank, (pool, place) in self._places.items() if pool.least and place >= pool.least]
        for rank in more:
            self._room.ask(*self._places[rank])
        until, there = time.monotonic() + SECONDS_TO_LOOK, dict[tuple[str, int], bool]()
        teams = {rank: (pool.name, place // pool.team) for rank, (pool, place) in self._places.items()}
        for rank in more:
            if teams[rank] not in there:  # all of it is there, or nothing
                there[teams[rank]] = self._room.is_there(*self._places[rank], max(0.0, until - time.monotonic()))
        missing = [rank for rank in more if not there[teams[rank]]]
        ranks = [rank for rank in self._places if rank not in missing]
        for rank in missing:
            self._await(rank)
        self._spawn(ranks)
        return missing

    def arrived(self) -> dict[int, str]:
        """Return ranks that were awaited and are there now, with their pools."""
        found: dict[int, str] = {}
        for rank, (ref, handle) in list(self._awaited.items()):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            del self._awaited[rank]
            try:
                ray.get(ref)
                self.handles[rank] = handle
                self._introduce([rank])
                found[rank] = self._places[rank][0].name
            except (RayError, RankLost, RunError):
                self.give_up(rank)
        return found

    def give_up(self, rank: int) -> None:
        """End a rank that has come and failed, and await another one in its place, unless that was often enough."""
        with suppress(KeyError, RayError, ValueError):
            ray.kill(self.handles.pop(rank))
        self.where.pop(rank, None)
        pool, place = self._places[rank]
        self._failed[pool.name, place] = self._failed.get((pool.name, place), 0) + 1
        if self._failed[pool.name, place] < TRIES:
            self._await(rank)

    def _await(self, gone: int) -> None:
        """Have a rank begin in the place of one that is gone, as soon as there is room."""
        rank = next(self._numbers)
        self._places[rank] = self._places[gone]
        handle = self._begin(rank)
        self._awaited[rank] = handle.work.remote("alive"), handle

    def restart(self, ranks: Sequence[int], within: float | None = None) -> list[int]:
        """End some ranks, as far as they are there, and start them anew.

        Returns those that have not begun ``within`` so many seconds, and are ended. Without it they take the time that
        they need, up to a limit for which RankLost is raised.
        """
        check_head()
        self._answers.starting = frozenset(ranks)
        for rank in ranks:
            self._answers.unwatch(rank)
            with suppress(RayError, ValueError):
                ray.kill(self.handles[rank])
        self._restarts += 1
        try:
            return self._spawn(ranks, within)
        finally:
            self._answers.starting = frozenset()

    def take_over(self, stand_ins: Mapping[int, int]) -> None:
        """Have all ranks ask others in the place of those that are gone for good."""
        for rank in stand_ins:
            self.where.pop(rank, None)
            self._answers.unwatch(rank)
            with suppress(KeyError, RayError, ValueError):  # one that is there, and computed with a lost one
                ray.kill(self.handles.pop(rank))
            self._await(rank)
        self._stand_ins = {gone: stand_ins.get(rank, rank) for gone, rank in self._stand_ins.items()} | dict(stand_ins)
        self._introduce(())

    def stop(self) -> None:
        """End all ranks, and the cluster if it was started here."""
        self._answers.unwatch_all()
        try:
            check_head()
        except ClusterLost:  # it would wait for what is gone
            self._room.abandon()
            self.handles.clear()
            return
        for handle in (*self.handles.values(), *(handle for _, handle in self._awaited.values())):
            with suppress(Exception):
                ray.kill(handle)
        self._awaited.clear()
        self.handles.clear()
        self._room.release()

    def record(self) -> dict[str, Any]:
        """Where the ranks are."""
        return {"ranks": len(self.where), "restarts": self._restarts}

    def _spawn(self, ranks: Iterable[int], within: float | None = None) -> list[int]:
        """Start actors, and tell all ranks of each other. Returns those that are ended, as they came too late."""
        ranks = list(ranks)
        self.handles |= {rank: self._begin(rank) for rank in ranks}
        begun = {rank: (self.handles[rank].work.remote("alive"), self.handles[rank]) for rank in ranks}
        late = [] if within is None else self._end_late(begun, within)
        there = {rank: asked for rank, asked in begun.items() if rank not in late}
        if there:
            self._told(self.wait(there, "starting ranks", SECONDS_TO_START))
        self._introduce(list(there))
        return late

    def _begin(self, rank: int) -> Any:
        """Begin the actor of a rank; it is there once there is room for it."""
        pool, place = self._places[rank]
        group, bundle = self._room.of(pool, place)
        at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 if pool.gpus else 0, "scheduling_strategy": at}
        options["runtime_env"] = {"env_vars": {"TORCHDYNAMO_DISABLE": "1"}} if not pool.gpus else {}
        actor: Any = ray.remote(**{"concurrency_groups": threads_of(len(self._places))})(RankActor)  # type: ignore[call-overload]
        return actor.options(**options).remote(rank, pool.name)

    def _end_late(self, begun: Mapping[int, Any], within: float) -> list[int]:
        """End the ranks that are not there after so many seconds; returns them."""
        ready = ray.wait([ref for ref, _ in begun.values()], num_returns=len(begun), timeout=within)[0]
        late: list[int] = []
        for rank, (ref, handle) in begun.items():
            try:
                if ref in ready:
                    ray.get(ref)
                    continue
            except RayError:  # it has died as it was started
                pass
            late.append(rank)
            with suppress(RayError, ValueError):
                ray.kill(handle)
        return late

    def _introduce(self, ranks: Sequence[int]) -> None:
        """Tell ranks of the run, and all of each other. Others that are gone are found when they are needed."""
        known = {**self.handles, **{gone: self.handles[rank] for gone, rank in self._stand_ins.items()}}
        begun = {rank: (h.begin.remote(self._config, known), h) for rank, h in self.handles.items()}
        new = {rank: begun.pop(rank) for rank in ranks}
        if new:
            self.where |= self._seeing(self._told(self.wait(new, "starting ranks", SECONDS_TO_START)))
        self._answers.watch({rank: self.where[rank] for rank in ranks})
        if begun:
            ray.wait([ref for ref, _ in begun.values()], num_returns=len(begun), timeout=SILENT)

    @staticmethod
    def _told(answers: dict[int, Any]) -> dict[int, Any]:
        failed = next((a for a in answers.values() if isinstance(a, Failed)), None)
        if failed is not None:
            raise RunError(f"the ranks could not be told of the run: {failed.text}")
        return answers

    def _seeing(self, where: dict[int, Any]) -> dict[int, Any]:
        """Return where ranks are. Raises RunError for those that do not have the folder of the run."""
        blind = {rank: there for rank, there in where.items() if not there.pop("sees")}
        if blind:
            rank, there = next(iter(blind.items()))
            raise RunError(
                f"rank {rank} of pool '{there['pool']}', on {there['node']}, does not see the folder of the run: "
                f"{self._folder}. Ranks meet in it, and write their journals and checkpoints there.",
                fix="Give --out a folder that all machines of the cluster share.",
            )
        return where

    # -- calls ------------------------------------------------------------------------------------------------------

    def send(self, rank: int, method: str, *args: Any) -> Any:
        """Begin a call of a rank: what will be its answer, and the process that gives it."""
        handle = self.handles[rank]
        return start(handle, method, args), handle

    def wait(
        self,
        begun: Mapping[int, Any],
        what: str,
        deadline: float | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """The answers by rank; see :meth:`.rank_answers.RankAnswers.wait`."""
        return self._answers.wait(begun, what, deadline, on_death)

    def headway(self) -> dict[int, Headway]:
        """How far each rank has come, of those that answer within a few seconds."""
        return self._answers.headway()
