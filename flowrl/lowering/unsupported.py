"""What a runtime cannot do of a plan: said by check and refused by run, in the same words, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import PlanError
from ..graph.may_see_older_weights import trained_on
from ..graph.tracing.trace_records import HandleLike, Traced
from ..placement.backends import REFERENCE, Backend, backend
from ..placement.plan.plan import Pipeline, Place, Plan
from ..placement.search.engine_refusals import refusals_of_use
from .deployment import has_model
from .lower import used_workers
from .scheme_of_program import sampled_workers, trained_workers


def unsupported(traced: Traced, plan: Plan, handles: Sequence[HandleLike], runtime: str) -> Iterator[PlanError]:
    """Yield what a runtime cannot do of a plan, with the line of the plan; ``flowrl simulate`` flies it all the same.

    ``runtime``: ``eager``, ``local`` or ``ray``.
    """
    refused = list(_pipeline(plan, _engines_that_follow(traced, plan, handles)))
    yield from refused
    if plan.pipeline.order != Pipeline().order and not refused:
        yield from _exchanged(traced, plan)
    if runtime != "ray":
        yield from _devices(plan)
        yield from _engines(plan)
    else:
        yield from _weights_elsewhere(traced, plan, handles)
    yield from _backends(traced, plan, handles)


def _engines_that_follow(traced: Traced, plan: Plan, handles: Sequence[HandleLike]) -> list[Backend]:
    """Return the rows of the table of what generates with weights that the program changes; without any, the
    reference."""
    names = trained_workers(traced) & sampled_workers(traced) & {h.name for h in handles if has_model(h)}
    found = dict.fromkeys(backend(plan.place_of(name, "generate").backend) for name in sorted(names))
    return list(found) or [backend(REFERENCE)]


def _pipeline(plan: Plan, engines: Sequence[Backend]) -> Iterator[PlanError]:
    """What every engine does, a whole call in program order, is not asked about."""
    steps, usual = plan.pipeline, Pipeline()
    asked = [("order", steps.order, {row: row.orders for row in engines})] if steps.order != usual.order else []
    if steps.publish != usual.publish:
        asked.append(("publish", steps.publish, {row: row.publishes for row in engines}))
    for key, word, have in asked:
        for row, words in have.items():
            if row.built and word in words:
                continue
            said = f"runs with {row.name} have {', '.join(words)} alone" if row.built else f"no run has {row.name}"
            fix = f"Write {key}: {getattr(usual, key)}. flowrl simulate says what {word} would gain."
            yield PlanError(f"{key}: {word}: {said}.", at=steps.at.get(key), fix=fix)


def _exchanged(traced: Traced, plan: Plan) -> Iterator[PlanError]:
    """Yield the calls whose prompt groups no run exchanges."""
    steps = plan.pipeline
    for title, (asks, made) in {
        p.sampler.title: (p.sampler.op.asks, p.sampler.makers) for p in trained_on(traced)
    }.items():
        if not asks:
            what = f"{title} keeps its rows until all have ended."
        elif made:
            what = f"{title} samples for rows that other calls have made; a run exchanges groups of drawn prompts."
        else:
            continue
        yield PlanError(f"order: {steps.order}: {what}", at=steps.at.get("order"), fix="Write order: fifo.")


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


def _weights_elsewhere(traced: Traced, plan: Plan, handles: Sequence[HandleLike]) -> Iterator[PlanError]:
    """Yield ops that look at the weights of a worker in another pool: the ranks that run them have none of these."""
    names = {h.name for h in handles}
    calls = [c for t in traced.trails for c in t.calls if c.worker in names and not c.op.external]
    for (worker, other), title in {(c.worker, name): c.title for c in calls for name in c.serves}.items():
        mine, theirs = plan.place_of(worker), plan.place_of(other)
        if mine.pool != theirs.pool:
            yield PlanError(
                f"{title} takes the weights of '{other}', which is in pool '{theirs.pool}'; "
                f"'{worker}' is in pool '{mine.pool}'.",
                at=mine.at,
                fix=f"Place '{worker}' in pool '{theirs.pool}', with the same mesh and backend as '{other}'.",
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
