"""A traced program with its plan: how its calls look to the schedule, to the cost model and to a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..graph.compile_paths import ids_by_site
from ..graph.may_see_older_weights import main_samplers, relaxed_calls, samples
from ..graph.tracing.trace_records import HandleLike, Traced
from ..placement.backends import backend
from ..placement.plan.plan import Place, Plan
from ..schedule.events import Follower, Memory, Setup
from ..schedule.scheme import Scheme


def trained_workers(traced: Traced) -> frozenset[str]:
    """Workers whose weights the program changes."""
    calls = (c for t in traced.trails for c in t.calls)
    return frozenset(c.worker for c in calls if c.updates == "weights" or c.op.cost == "train")


def sampled_workers(traced: Traced) -> frozenset[str]:
    """Workers that the program samples from, by an op of their own or through a handle."""
    workers: set[str] = set()
    for call in (c for t in traced.trails for c in t.calls):
        if samples(call.op, call.serves):
            workers.update(call.serves or (call.worker,))
    return frozenset(workers)


def handed_workers(traced: Traced) -> dict[str, tuple[str, ...]]:
    """Workers that ops of others are handed, by the names of those."""
    found: dict[str, dict[str, None]] = {}
    for call in (c for t in traced.trails for c in t.calls if c.worker):
        found.setdefault(call.worker, {}).update(dict.fromkeys(call.serves))
    return {worker: tuple(names) for worker, names in found.items() if names}


def scheme_of(
    traced: Traced,
    plan: Plan,
    handles: Sequence[HandleLike],
    *,
    memory: Mapping[str, Memory] | None = None,
    in_one: bool = False,
    queue: int = 0,
) -> Scheme:
    """Return how the calls of a program look to the schedule under a plan.

    ``in_one``: everything in one pool, one step at a time, as the eager runtime does it whatever the plan says.
    ``memory`` is that of pools whose residents have to take turns. ``queue``: calls that a busy pool is handed.
    """
    follow = sorted(trained_workers(traced) & sampled_workers(traced))
    workers = [h.name for h in handles]
    nodes, main, arguments = ids_by_site(traced), main_samplers(traced), {h.name: h.arguments for h in handles}
    if in_one:
        setup = Setup(("main",), {w: Follower("main", "main", shared=True) for w in follow})
        pools = dict.fromkeys(workers, "main")
        return Scheme(pools, setup=setup, nodes=nodes, main=main, arguments=arguments)
    train = {w: plan.pool(w, "train") for w in workers}
    generate = {w: plan.pool(w, "generate") for w in workers}
    steps = plan.pipeline
    followers = {w: Follower(train[w], generate[w], train[w] == generate[w] and not steps.staleness) for w in follow}
    plain = (steps.order, steps.publish) == ("fifo", "drain")  # what else is asked for is flown with any engine
    setup = Setup(
        tuple(plan.pools),
        followers,
        steps.staleness,
        steps.order,
        steps.window,
        steps.publish,
        steps.chunks,
        dict(memory or {}),
        queue=queue,
    )
    return Scheme(
        train,
        generate,
        relaxed_calls(traced),
        {p: {name: (name,) for name in held.sizes} | dict(held.turns) for p, held in (memory or {}).items()},
        setup,
        nodes,
        main,
        arguments,
        rowwise=frozenset(h.name for h in handles if _streams_rows(h.cls)),
        one_by_one=frozenset(w for w in follow if not plain or leave_one_by_one(plan.place_of(w, "generate"))),
    )


def _streams_rows(cls: type[Any]) -> bool:
    """Whether environments ask the engine of a worker row by row."""
    return hasattr(cls, "streams_rows") and cls.streams_rows()


def leave_one_by_one(place: Place) -> bool:
    """Return whether rows of several calls share a batch of the engine of a place in runs, and leave it one by one.

    Those of an engine that takes new weights between whole calls alone do not. A model may be split over ranks.
    """
    return len(backend(place.backend).publishes) > 1
