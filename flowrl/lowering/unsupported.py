"""What a runtime cannot do of a plan: said by check and refused by run, in the same words, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import PlanError
from ..graph.tracing.trace_records import HandleLike, Traced
from ..placement.backends import REFERENCE, Backend, backend
from ..placement.plan.plan import Pipeline, Place, Plan
from .deployment import has_model
from .engine_refusals import refusals_of_use
from .lower import used_workers
from .scheme_of_program import sampled_workers, trained_workers


def unsupported(traced: Traced, plan: Plan, handles: Sequence[HandleLike], runtime: str) -> Iterator[PlanError]:
    """Yield what a runtime cannot do of a plan, with the line of the plan; ``flowrl simulate`` flies it all the same.

    ``runtime``: ``eager``, ``local`` or ``ray``.
    """
    yield from _pipeline(plan, _engines_that_follow(traced, plan, handles))
    if runtime != "ray":
        yield from _devices(plan)
        yield from _engines(plan)
    yield from _backends(traced, plan, handles)


def _engines_that_follow(traced: Traced, plan: Plan, handles: Sequence[HandleLike]) -> list[Backend]:
    """What generates with weights that the program changes, by its row of the table; without any, the reference."""
    names = trained_workers(traced) & sampled_workers(traced) & {h.name for h in handles if has_model(h)}
    return [backend(plan.place_of(name, "generate").backend) for name in sorted(names)] or [backend(REFERENCE)]


def _pipeline(plan: Plan, engines: Sequence[Backend]) -> Iterator[PlanError]:
    """What every engine does, a whole call in program order, is not asked about."""
    steps, usual = plan.pipeline, Pipeline()
    if steps.order != usual.order and not all(row.built and steps.order in row.orders for row in engines):
        yield PlanError(
            f"order: {steps.order} needs an engine that finishes prompt groups one by one; "
            "those of flowrl answer a whole call at once.",
            at=steps.at.get("order"),
            fix="Write order: fifo. flowrl simulate says what a window would gain.",
        )
    if steps.publish == usual.publish:
        return
    fix = f"Write publish: drain. flowrl simulate says what {steps.publish} would gain."
    without = [row for row in dict.fromkeys(engines) if not row.built or steps.publish not in row.publishes]
    for row in without:
        have = f"runs with {row.name} have {', '.join(row.publishes)} alone" if row.built else f"no run has {row.name}"
        yield PlanError(f"publish: {steps.publish}: {have}.", at=steps.at.get("publish"), fix=fix)


def _devices(plan: Plan) -> Iterator[PlanError]:
    """Yield places with more than the one device that a process has for each pool."""
    fix = "Run it with --runtime ray, or give the pool one device."
    told: set[str] = set()
    for worker, use, place in plan.roles():
        pool = plan.pools[place.pool]
        if place.mesh.size > 1:
            told.add(pool.name)
            yield PlanError(
                f"{plan.title_of(worker, use)} has a mesh of {place.mesh.size} devices ({place.mesh}); "
                "this process runs a pool on one device.",
                at=place.at or pool.at,
                fix=fix,
            )
    taken = {place.pool for _, _, place in plan.roles()} - told
    for pool in plan.pools.values():
        if len(pool.devices) > 1 and pool.name in taken:
            what = f"pool '{pool.name}' has {len(pool.devices)} devices; this process runs a pool on one device."
            yield PlanError(what, at=pool.at, fix=fix)


def _engines(plan: Plan) -> Iterator[PlanError]:
    """Yield workers with two engines in one pool, where a process has one for both uses."""
    for worker, places in plan.place.items():
        stated = [places[use] for use in ("train", "generate") if use in places]
        if len({p.backend for p in stated}) > len({p.pool for p in stated}):
            yield PlanError(
                f"'{worker}' trains with {stated[0].backend} and generates with {stated[1].backend} in one pool; "
                "in one process a pool has one engine for both.",
                at=stated[1].at,
                fix="Give it a pool of its own to generate in, or name one that does both.",
            )


def _backends(traced: Traced, plan: Plan, handles: Sequence[HandleLike]) -> Iterator[PlanError]:
    """Yield what backends do not do with the workers that a program trains, samples from and reads with."""
    trained, sampled = trained_workers(traced), sampled_workers(traced)
    used = used_workers(traced, handles)
    read = {c.worker for trail in traced.trails for c in trail.calls if c.op.cost != "generate"}
    for name in (h.name for h in handles if h.name in used and has_model(h)):
        place, serving = plan.place_of(name, "train"), plan.place_of(name, "generate")
        if name in trained or name in read or name not in sampled:
            yield from _refused(name, plan, place, "train", trained=name in trained)
        if name in sampled and (serving != place or not (name in trained or name in read)):
            yield from _refused(name, plan, serving, "generate", trained=name in trained)


def _refused(name: str, plan: Plan, place: Place, use: str, *, trained: bool) -> Iterator[PlanError]:
    pool = plan.pools[place.pool]
    for refusal in refusals_of_use(place, use=use, trained=trained, size=pool.size):
        yield refusal.error(plan.title_of(name, use), place.at or pool.at)
