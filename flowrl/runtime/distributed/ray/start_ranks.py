"""Ranks on Ray: a local cluster or a running one, a placement group for each pool, an actor for each rank."""

from __future__ import annotations

import itertools
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....errors import ClusterLost, RankLost, RunError, UsageError
from ....graph.script.site import is_shipped, is_users
from ....workers.headway import Headway
from ..process_exits import Watched
from ..protocol import Failed, RankConfig
from .group_signals import deaf
from .private_ray import PrivateRay
from .rank_actor import RankActor, start, threads_of
from .ray_head import check_head, end_head

RESOURCE = "flowrl_rank"  # of a cluster that is started here: one for each rank on a CPU
GRACE = 5.0  # seconds that the other ranks of a call have when one has failed
LAST_WORDS = 1.0  # seconds that they have when one has died: what they are at is done again
SECONDS_TO_PLACE = 600.0
SECONDS_TO_START = 600.0
_OUT_OF_MEMORY = "it ran out of memory, and Ray's memory monitor ended it"
SECONDS_TO_LOOK = 5.0  # at the start, for room for ranks that may be missing
TRIES = 3  # of a rank that comes and fails
LOOK = 1.0  # seconds after which who waits looks whether others have found a rank to be lost
SILENT = 10.0  # seconds after which a rank that does not even say that it is there counts as hung


@dataclass(frozen=True)
class PoolOfRanks:
    """The ranks of one pool, and how many GPUs each has: ``PoolOfRanks("train", (0, 1), gpus=1)``.

    ``least``: how many of them have to be there; 0 are all.
    """

    name: str
    ranks: tuple[int, ...]
    gpus: int = 0
    least: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """What one of them takes of the cluster."""
        if self.gpus:
            return {"CPU": 1, "GPU": 1}
        return {"CPU": 1, RESOURCE: 1} if RESOURCE in ray.cluster_resources() else {"CPU": 1}


@dataclass(frozen=True)
class Asked:
    """When ranks were asked whether they are there, and by their answers to come which processes: (rank, handle)."""

    at: float
    answers: Mapping[Any, tuple[int, Any]]


class RayRanks:
    """The ranks of a run. ``address``: of a running cluster, ``auto`` for the one of this machine; None starts one.

    Modules of the user's that are nowhere installed travel by value.
    """

    def __init__(self, pools: Sequence[PoolOfRanks], *, address: str | None = None) -> None:
        self.pools, self.address = tuple(pools), address
        self.handles: dict[int, Any] = {}
        self.where: dict[int, dict[str, Any]] = {}
        self._groups: dict[str, Any] = {}  # by pool: room for the ranks that have to be there
        self._rooms: dict[tuple[str, int], Any] = {}  # for each of the others, by pool and place
        self._config: Any = None
        self._ours, self._private = False, PrivateRay()
        self._places: dict[int, tuple[PoolOfRanks, int]] = {
            rank: (pool, place) for pool in self.pools for place, rank in enumerate(pool.ranks)
        }
        self._stand_ins: dict[int, int] = {}  # of ranks that are gone for good
        self._numbers = itertools.count(1 + max(self._places, default=0))
        self._awaited: dict[int, tuple[Any, Any]] = {}  # ranks for which there was no room yet: answer to come, handle
        self._failed: dict[tuple[str, int], int] = {}  # by pool and place: how often one has come and failed
        self._restarts = 0
        self._watched: dict[int, Watched] = {}  # the processes of this host
        self._fallen: dict[int, Any] = {}  # processes that were found to be lost
        self._starting: frozenset[int] = frozenset()

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self, config: RankConfig) -> list[int]:
        """Join or start the cluster, place the pools and start their ranks.

        Returns those for which there is no room, of pools that begin with fewer; they are awaited.
        """
        self._connect()
        for module in own_modules():
            cloudpickle.register_pickle_by_value(module)
        self._config = ray.put(config)
        for pool in sorted(self.pools, key=lambda pool: not pool.gpus):  # processes leave the cores beside GPUs alone
            self._groups[pool.name] = self._placed(pool)
        more = [rank for rank, (pool, place) in self._places.items() if pool.least and place >= pool.least]
        for rank in more:
            pool, place = self._places[rank]
            self._rooms[pool.name, place] = placement_group([pool.bundle], name=f"flowrl-{pool.name}-{place}")
        until = time.monotonic() + SECONDS_TO_LOOK
        missing = [r for r in more if not self._room_of(r)[0].wait(max(0.0, until - time.monotonic()))]
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
        self._starting = frozenset(ranks)
        for rank in ranks:
            if rank in self._watched:
                self._watched.pop(rank).close()  # from here on it is ended by the run
            with suppress(RayError, ValueError):
                ray.kill(self.handles[rank])
        self._restarts += 1
        try:
            return self._spawn(ranks, within)
        finally:
            self._starting = frozenset()

    def take_over(self, stand_ins: Mapping[int, int]) -> None:
        """Have all ranks ask others in the place of those that are gone for good."""
        for rank in stand_ins:
            self.where.pop(rank, None)
            self.handles.pop(rank, None)
            self._await(rank)
        self._stand_ins = {gone: stand_ins.get(rank, rank) for gone, rank in self._stand_ins.items()} | dict(stand_ins)
        self._introduce(())

    def stop(self) -> None:
        """End all ranks, and the cluster if it was started here."""
        while self._watched:
            self._watched.popitem()[1].close()
        try:
            check_head()
        except ClusterLost:  # it would wait for what is gone
            end_head()
            self._private.close()
            self.handles.clear()
            self._groups.clear()
            return
        for handle in (*self.handles.values(), *(handle for _, handle in self._awaited.values())):
            with suppress(Exception):
                ray.kill(handle)
        self._awaited.clear()
        for group in (*self._groups.values(), *self._rooms.values()):
            with suppress(Exception):
                remove_placement_group(group)
        self.handles.clear()
        self._groups.clear()
        if self._ours:
            ray.shutdown()
            self._private.close()
            self._ours = False

    def record(self) -> dict[str, Any]:
        """Where the ranks are."""
        return {"ranks": len(self.where), "restarts": self._restarts}

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.address is not None:
            try:
                with deaf():
                    ray.init(address=self.address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"--address {self.address}: no Ray cluster answers there: {str(error).splitlines()[0]}",
                    fix="Start one with 'ray start --head', or leave --address out for one on this machine. A cluster "
                    "that asks for a token needs RAY_AUTH_MODE=token here too.",
                ) from error
        else:
            count = len(self._places)
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            cores = max(count + 1, os.cpu_count() or 1)
            quiet |= self._private.open()
            try:
                with deaf():
                    ray.init(address="local", num_cpus=cores, resources={RESOURCE: count}, **quiet)
            except BaseException:
                self._private.close()
                raise
        self._ours = True

    def _placed(self, pool: PoolOfRanks) -> Any:
        """Room for all ranks of a pool that have to be there, at once."""
        bundle, count = pool.bundle, pool.least or len(pool.ranks)
        group = placement_group([bundle] * count, strategy="PACK", name=f"flowrl-{pool.name}-{os.getpid()}")
        if not group.wait(SECONDS_TO_PLACE if self.address else 60):
            have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU", RESOURCE)}
            remove_placement_group(group)
            raise RunError(
                f"the cluster has no room for pool '{pool.name}': {count} ranks of {_said(bundle)}.",
                have=_said(have),
                fix="Wait until others are done, add nodes, or give the pool fewer devices.",
            )
        return group

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
        pool, _ = self._places[rank]
        group, bundle = self._room_of(rank)
        at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 if pool.gpus else 0, "scheduling_strategy": at}
        options["runtime_env"] = {"env_vars": {"TORCHDYNAMO_DISABLE": "1"}} if not pool.gpus else {}
        actor: Any = ray.remote(**{"concurrency_groups": threads_of(len(self._places))})(RankActor)  # type: ignore[call-overload]
        return actor.options(**options).remote(rank, pool.name)

    def _room_of(self, rank: int) -> tuple[Any, int]:
        """Return the placement group of a rank, and its number there."""
        pool, place = self._places[rank]
        alone = self._rooms.get((pool.name, place))
        return (self._groups[pool.name], place) if alone is None else (alone, 0)

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
            self.where |= self._told(self.wait(new, "starting ranks", SECONDS_TO_START))
        self._watch(ranks)
        if begun:
            ray.wait([ref for ref, _ in begun.values()], num_returns=len(begun), timeout=SILENT)

    @staticmethod
    def _told(answers: dict[int, Any]) -> dict[int, Any]:
        failed = next((a for a in answers.values() if isinstance(a, Failed)), None)
        if failed is not None:
            raise RunError(f"the ranks could not be told of the run: {failed.text}")
        return answers

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
        """The answers by rank.

        Raises RankLost for ranks that died, here or where one of these has asked, and for those that have not answered
        ``deadline`` seconds after this was called. ``on_death`` is called as soon as one has died.
        """
        check_head()
        refs = [ref for ref, _ in begun.values()]
        if len(refs) > 1:  # one that fails may leave the others waiting for it: they are looked at one by one
            ray.wait(refs, num_returns=len(refs), timeout=0.2)
            ready, late = ray.wait(refs, num_returns=len(refs), timeout=0)
            if late or len(ready) < len(refs):
                return self._one_by_one(begun, what, deadline, on_death)
        try:
            answers = ray.get(refs, timeout=LOOK if deadline is None else min(LOOK, deadline))
        except (RayError, TimeoutError):
            return self._one_by_one(begun, what, deadline, on_death)
        if any(isinstance(a, Failed) for a in answers) and (dead := self._dead()[0]):
            raise self._lost(dict.fromkeys(dead, "its process is gone"), what, dict(zip(begun, answers, strict=True)))
        return dict(zip(begun, answers, strict=True))

    def _one_by_one(
        self, begun: Mapping[int, Any], what: str, deadline: float | None, on_death: Callable[[], None] | None
    ) -> dict[int, Any]:
        """The answers as they come. When one has failed or died, the others have some seconds more."""
        by_ref = {ref: rank for rank, (ref, _) in begun.items()}
        answers: dict[int, Any] = {}
        died: dict[int, str] = {}
        ends = None if deadline is None else time.monotonic() + deadline
        asked: Asked | None = None
        while by_ref:
            if asked is None and ends is not None and time.monotonic() > ends - SILENT:
                asked = self._ask()
            left = LOOK if ends is None else max(0.0, min(LOOK, ends - time.monotonic()))
            ready = ray.wait(list(by_ref), num_returns=1, timeout=left)[0]
            check_head()
            for ref in ready:
                rank = by_ref.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                except RayTaskError as error:
                    answers[rank] = Failed(None, str(error.cause or error), str(error))
                except RayError as error:
                    died[rank] = _OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else str(error).splitlines()[0]
                if rank in died or isinstance(answers.get(rank), Failed):
                    ends = min(ends or math.inf, time.monotonic() + (LAST_WORDS if died else GRACE))
                if rank in died and by_ref and on_death is not None:
                    on_death()
                    on_death = None
            if not ready and ends is not None and time.monotonic() >= ends:
                break
            known = [rank for rank in by_ref.values() if self._fallen.get(rank) is begun[rank][1]]
            if known:  # somebody else has waited for it already
                raise self._lost(dict.fromkeys(known, "it is lost"), what, answers)
        failed = [a for a in answers.values() if isinstance(a, Failed)]
        self._fallen |= {rank: begun[rank][1] for rank in died}
        dead, silent = self._dead(asked) if died or failed or by_ref else ([], [])
        died = dict.fromkeys(dead, "its process is gone") | died
        if died:
            raise self._lost(died, what, answers)
        if by_ref and (silent or not failed):
            late = silent or sorted(by_ref.values())  # who waits for a silent one is late too, and not to blame
            there = {**self.handles, **{rank: handle for rank, (_, handle) in begun.items()}}
            self._fallen |= {rank: there[rank] for rank in late}  # nobody waits as long for one of them again
            raise RankLost(
                f"rank {late[0]} of pool '{self._places[late[0]][0].name}' has not answered {what} in time.",
                ranks=late,
                answers=answers,
                fix="Give the plan a longer pipeline.deadline if such calls may take that long.",
            )
        return {rank: answers[rank] for rank in begun if rank in answers}

    def _lost(self, died: Mapping[int, str], what: str, answers: Mapping[int, Any]) -> RankLost:
        rank, more = min(died), len(died) - 1
        ends = [_OUT_OF_MEMORY] if _OUT_OF_MEMORY in died.values() else self._ends(died)
        return RankLost(
            f"rank {rank} of pool '{self._places[rank][0].name}' died during {what}"
            f"{f', and {more} more' if more else ''}{''.join(f': {end}' for end in ends[:1])}.",
            ranks=sorted(died),
            answers=answers,
            fix="If it happens again, look into the logs of Ray for this process: memory is the usual reason.",
        )

    def _ends(self, ranks: Iterable[int]) -> list[str]:
        """How these ended, as far as this host knows: those that ran out of memory first."""
        watched = [self._watched.get(rank) for rank in sorted(ranks)]  # another thread may start them again meanwhile
        found = [one.ended() for one in watched if one is not None]
        return sorted(filter(None, found), key=lambda end: "ran out of memory" not in end)

    def _watch(self, ranks: Iterable[int]) -> None:
        """Be able to say how these end, as far as they are on this host."""
        here = ray.util.get_node_ip_address()
        for rank in ranks:
            if (before := self._watched.pop(rank, None)) is not None:
                before.close()
            if self.where[rank]["node"] == here:
                self._watched[rank] = Watched(self.where[rank]["pid"])

    def _ask(self) -> Asked:
        """Ask all ranks whether they are there, but for those that are being started."""
        there = {rank: handle for rank, handle in self.handles.items() if rank not in self._starting}
        return Asked(time.monotonic(), {h.pull.remote("alive"): (rank, h) for rank, h in there.items()})

    def headway(self) -> dict[int, Headway]:
        """How far each rank has come, of those that answer within a few seconds."""
        asked = {h.pull.remote("headway"): rank for rank, h in list(self.handles.items()) if rank not in self._starting}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=SILENT)[0] if asked else []
        found: dict[int, Headway] = {}
        for ref in ready:
            with suppress(RayError):
                found[asked[ref]] = ray.get(ref)
        return found

    def _dead(self, asked: Asked | None = None) -> tuple[list[int], list[int]]:
        """Ranks whose process is gone, and those that say nothing; where all had answered to ``asked``, as of now."""
        gone: list[int] = []
        late: list[int] = []
        for earlier in (None,) if asked is None else (asked, None):
            asking = earlier or self._ask()
            left = max(0.0, asking.at + SILENT - time.monotonic())
            ready, waited = ray.wait(list(asking.answers), num_returns=len(asking.answers), timeout=left)
            late = [r for r, handle in (asking.answers[ref] for ref in waited) if self.handles.get(r) is handle]
            for ref in ready:
                rank, handle = asking.answers[ref]
                try:
                    ray.get(ref)
                except RayError:
                    if self.handles.get(rank) is handle:  # nobody has started it anew since
                        gone.append(rank)
                        self._fallen[rank] = handle
            if gone or late:
                break
        return gone, sorted(late)


def own_modules() -> list[ModuleType]:
    """The modules that are loaded and nowhere installed: the script, shipped or not, and what lies beside it."""
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    found: list[ModuleType] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and module.__name__ != "__main__" and is_users(module):
            path = Path(file).resolve()
            if not path.is_file():  # torch.ops says that it lies in _ops.py, which is nowhere
                continue
            elsewhere = "site-packages" not in path.parts and not any(path.is_relative_to(f) for f in installed)
            if elsewhere or is_shipped(file):
                found.append(module)
    return found


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{v:g} {k}" for k, v in sorted(resources.items())) or "nothing"
