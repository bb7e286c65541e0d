"""Room for ranks on a cluster, joined or started here: a placement group for each pool, or each team on a node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ....errors import RunError, UsageError
from .group_signals import deaf
from .private_ray import PrivateRay
from .ray_head import end_head

RESOURCE = "flowrl_rank"  # of a cluster that is started here: one for each rank on a CPU
SECONDS_TO_PLACE = 600.0


@dataclass(frozen=True)
class PoolOfRanks:
    """The ranks of one pool, and how many GPUs each has: ``PoolOfRanks("train", (0, 1), gpus=1)``.

    ``least``: how many of them have to be there; 0 are all. ``team``: how many compute together, one after the other.
    ``near``: each team has to be on one node; others are on as few as Ray can.
    """

    name: str
    ranks: tuple[int, ...]
    gpus: int = 0
    least: int = 0
    team: int = 1
    near: bool = False

    @property
    def bundle(self) -> dict[str, float]:
        """What one of them takes of the cluster."""
        if self.gpus:
            return {"CPU": 1, "GPU": 1}
        return {"CPU": 1, RESOURCE: 1} if RESOURCE in ray.cluster_resources() else {"CPU": 1}


class ClusterRoom:
    """``ClusterRoom(pools, address)``: the cluster, and what of it the ranks of these pools take."""

    def __init__(self, pools: Sequence[PoolOfRanks], address: str | None) -> None:
        self._pools, self._address = pools, address
        self._groups: dict[str, Any] = {}  # by pool: room for the ranks that have to be there
        self._teams: dict[tuple[str, int], Any] = {}  # room for a team, by pool and its number
        self._ours, self._private = False, PrivateRay()

    def connect(self) -> None:
        """Join the cluster, or start one. Raises UsageError where none answers at the address."""
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self._address is not None:
            try:
                with deaf():
                    ray.init(address=self._address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"--address {self._address}: no Ray cluster answers there: {str(error).splitlines()[0]}",
                    fix="Start one with 'ray start --head', or leave --address out for one on this machine. A cluster "
                    "that asks for a token needs RAY_AUTH_MODE=token here too.",
                ) from error
        else:
            count = sum(len(pool.ranks) for pool in self._pools)
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

    def reserve(self, pool: PoolOfRanks) -> None:
        """Take room for all ranks of a pool that have to be there, at once. Raises RunError where there is none."""
        bundle, count = pool.bundle, pool.least or len(pool.ranks)
        if pool.near:
            groups = [self._ask(pool, number) for number in range(count // pool.team)]
        else:
            name = f"flowrl-{pool.name}-{os.getpid()}"
            groups = [placement_group([bundle] * count, strategy="PACK", name=name)]
            self._groups[pool.name] = groups[0]
        until = time.monotonic() + (SECONDS_TO_PLACE if self._address else 60)
        if not all(group.wait(max(0.0, until - time.monotonic())) for group in groups):
            have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU", RESOURCE)}
            self._give_back(pool)
            together = f", each {pool.team} on one node" if pool.near else ""
            raise RunError(
                f"the cluster has no room for pool '{pool.name}': {count} ranks of {_said(bundle)}{together}.",
                have=_said(have),
                fix="Wait until others are done, add nodes, or give the pool fewer devices.",
            )

    def ask(self, pool: PoolOfRanks, place: int) -> None:
        """Ask for room for one more rank of a pool, which may come later; on one node for all that compute together."""
        self._ask(pool, place // pool.team)

    def _ask(self, pool: PoolOfRanks, number: int) -> Any:
        if (pool.name, number) not in self._teams:
            bundles, name = [pool.bundle] * pool.team, f"flowrl-{pool.name}-{number}-{os.getpid()}"
            self._teams[pool.name, number] = placement_group(bundles, strategy="STRICT_PACK", name=name)
        return self._teams[pool.name, number]

    def _give_back(self, pool: PoolOfRanks) -> None:
        """Give back all that a pool has."""
        for group in (self._groups.pop(pool.name, None), *(g for (n, _), g in self._teams.items() if n == pool.name)):
            if group is not None:
                remove_placement_group(group)
        self._teams = {key: group for key, group in self._teams.items() if key[0] != pool.name}

    def of(self, pool: PoolOfRanks, place: int) -> tuple[Any, int]:
        """Return the placement group of a rank of a pool, and its number there."""
        team = self._teams.get((pool.name, place // pool.team))
        return (self._groups[pool.name], place) if team is None else (team, place % pool.team)

    def is_there(self, pool: PoolOfRanks, place: int, seconds: float) -> bool:
        """Whether there is room for a rank, within so many seconds."""
        return self.of(pool, place)[0].wait(seconds)

    def abandon(self) -> None:
        """The cluster is lost: end what is left of it here, which would wait for what is gone."""
        end_head()
        self._private.close()
        self._groups.clear()

    def release(self) -> None:
        """Give the room back, and end the cluster if it was started here."""
        for pool in self._pools:
            with suppress(Exception):
                self._give_back(pool)
        if self._ours:
            ray.shutdown()
            self._private.close()
            self._ours = False


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{v:g} {k}" for k, v in sorted(resources.items())) or "nothing"
