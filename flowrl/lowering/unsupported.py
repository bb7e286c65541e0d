"""What a runtime cannot do of a plan: said by check and refused by run, in the same words, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import PlanError
from ..graph.terms import Traced
from ..placement.plan.plan import Place, Plan
from .deployment import COLLECTIVE, has_model
from .engines import AXES_OF
from .execution import used_workers
from .roles import HandleLike
from .scheme import sampled_workers, trained_workers

ORDERS = ("fifo",)  # in which the driver of a run hands rows to updates
MODES = ("drain",)  # in which it publishes weights


def unsupported(traced: Traced, plan: Plan, handles: Sequence[HandleLike], runtime: str) -> Iterator[PlanError]:
    """Yield what a runtime cannot do of a plan, with the line of the plan; ``flowrl simulate`` flies it all the same.

    ``runtime``: ``eager``, ``local`` or ``ray``.
    """
    yield from _pipeline(plan)
    if runtime == "ray":
        yield from _whole_models(traced, plan, handles)
    else:
        yield from _devices(plan)


def _pipeline(plan: Plan) -> Iterator[PlanError]:
    """No engine of today gives rows one by one, or can be stopped between two tokens: it answers a whole call."""
    steps = plan.pipeline
    if steps.order not in ORDERS:
        yield PlanError(
            f"order: {steps.order} needs an engine that finishes prompt groups one by one; "
            "those of flowrl answer a whole call at once.",
            at=steps.at.get("order"),
            fix="Write order: fifo. flowrl simulate says what a window would gain.",
        )
    if steps.publish not in MODES:
        yield PlanError(
            f"publish: {steps.publish} needs an engine that can be interrupted; "
            "those of flowrl answer a whole call at once.",
            at=steps.at.get("publish"),
            fix=f"Write publish: drain. flowrl simulate says what {steps.publish} would gain.",
        )


def _devices(plan: Plan) -> Iterator[PlanError]:
    """A process has one device for each pool."""
    fix = "Run it with --runtime ray, or give the pool one device."
    told: set[str] = set()
    for worker, use, place in plan.roles():
        pool = plan.pools[place.pool]
        if place.mesh.size > 1:
            title = worker if len(plan.place[worker]) == 1 else f"{worker}.{use}"
            told.add(pool.name)
            yield PlanError(
                f"{title} has a mesh of {place.mesh.size} devices ({place.mesh}); "
                "this process runs a pool on one device.",
                at=place.at or pool.at,
                fix=fix,
            )
    taken = {place.pool for _, _, place in plan.roles()} - told
    for pool in plan.pools.values():
        if len(pool.devices) > 1 and pool.name in taken:
            what = f"pool '{pool.name}' has {len(pool.devices)} devices; this process runs a pool on one device."
            yield PlanError(what, at=pool.at, fix=fix)


def _whole_models(traced: Traced, plan: Plan, handles: Sequence[HandleLike]) -> Iterator[PlanError]:
    """An engine that holds whole models has one on each rank, and does not train with the others."""
    trained, sampled = trained_workers(traced), sampled_workers(traced)
    used = used_workers(traced, handles)
    for handle in handles:
        name = handle.name
        if name not in used or not has_model(handle):
            continue
        place, serving = plan.place_of(name, "train"), plan.place_of(name, "generate")
        if place.backend not in AXES_OF:
            yield from _whole_model(name, plan, place, trains=name in trained)
        if name in sampled and serving != place and serving.backend not in AXES_OF:
            yield from _whole_model(name, plan, serving, serving=True)


def _whole_model(
    name: str, plan: Plan, place: Place, *, trains: bool = False, serving: bool = False
) -> Iterator[PlanError]:
    size = plan.pools[place.pool].size
    if trains and size > 1:
        yield PlanError(
            f"'{name}' is trained by '{place.backend}' on {size} devices, and that backend trains on one.",
            at=place.at,
            fix="Write backend: fsdp2, with mesh: {fsdp: " + str(size) + "}.",
        )
        return
    split = {a: n for a, n in place.mesh.axes.items() if a != "dp"}
    if split:
        what = " x ".join(f"{a}={n}" for a, n in split.items())
        replicas = f"mesh: {{dp: {size}}}"
        yield PlanError(
            f"'{name}': '{place.backend}' holds whole models, and cannot be split by {what}.",
            at=place.at,
            fix=f"Write {replicas}." if serving else f"Write backend: {COLLECTIVE[0]}, or {replicas}.",
        )
