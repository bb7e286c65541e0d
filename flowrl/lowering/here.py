"""Whether this process can run a plan: a device for each pool, and an engine that does what the pipeline asks."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..placement.plan.plan import Plan, Pool
from ..schedule.scheme import Scheme

AHEAD = 3  # calls that ranks are handed while they are at one


def check_runs_here(plan: Plan, *, ranks: bool = False) -> None:
    """Raise PlanError for what a runtime cannot do: interruptions, and in one process several devices to a pool.

    ``ranks``: a process for each device.
    """
    for worker, use, place in () if ranks else plan.roles():
        pool = plan.pools[place.pool]
        if place.mesh.size > 1:
            title = worker if len(plan.place[worker]) == 1 else f"{worker}.{use}"
            raise PlanError(
                f"{title} has a mesh of {place.mesh.size} devices ({place.mesh}); "
                "this process runs a pool on one device.",
                at=place.at or pool.at,
                fix="Run it with --runtime ray, or give the pool one device.",
            )
    for pool in () if ranks else plan.pools.values():
        if len(pool.devices) > 1 and any(plan.pools[p.pool] is pool for _, _, p in plan.roles()):
            raise _too_many(pool)
    if plan.pipeline.publish != "drain":
        raise PlanError(
            f"publish: {plan.pipeline.publish} needs an engine that can be interrupted; "
            "the engine of this process answers a whole call at once.",
            at=plan.pipeline.at.get("publish"),
            fix="Write publish: drain.",
        )


def in_one_process(plan: Plan) -> bool:
    """Whether a process has all that the plan places: one device for each pool."""
    places = [place for _, _, place in plan.roles()]
    return all(p.mesh.size == 1 and len(plan.pools[p.pool].devices) <= 1 for p in places)


def _too_many(pool: Pool) -> PlanError:
    return PlanError(
        f"pool '{pool.name}' has {len(pool.devices)} devices; this process runs a pool on one device.",
        at=pool.at,
        fix="Run it with --runtime ray, or give the pool one device.",
    )


def scheme_here(scheme: Scheme, *, ranks: bool = False) -> Scheme:
    """The schedule as this process keeps it. Its engine finishes all groups of a call at once, in the order of the
    calls, so that a window has nothing to exchange. ``ranks`` have their next calls while they are at one: the way to
    them takes as long as some short calls."""
    return replace(scheme, setup=replace(scheme.setup, order="fifo", queue=AHEAD if ranks else 0))
