"""A traced program with its plan: how its calls look to the schedule, to the cost model and to a reader."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph.compile import ids_by_site
from ..graph.relaxed import main_samplers, relaxed_calls, samples
from ..graph.terms import Traced
from ..placement.plan.plan import Plan
from ..schedule.events import Follower, Memory, Setup
from ..schedule.scheme import Scheme


def trained_workers(traced: Traced) -> frozenset[str]:
    """Workers whose weights the program changes."""
    calls = (c for t in traced.trails for c in t.calls)
    return frozenset(c.worker for c in calls if c.updates == "weights" or c.op.cost == "train")


def sampled_workers(traced: Traced) -> frozenset[str]:
    """Workers that the program samples from, by an op of their own or through a handle."""
    found: set[str] = set()
    for call in (c for t in traced.trails for c in t.calls):
        if samples(call.op, call.serves):
            found.update(call.serves or (call.worker,))
    return frozenset(found)


def scheme_of(
    traced: Traced,
    plan: Plan,
    workers: tuple[str, ...],
    *,
    memory: Mapping[str, Memory] | None = None,
    in_one: bool = False,
) -> Scheme:
    """How the calls of a program look to the schedule under a plan.

    ``in_one``: everything in one pool, one step at a time, as the eager runtime does it whatever the plan says.
    ``memory`` is that of pools whose residents may have to take turns.
    """
    follow = sorted(trained_workers(traced) & sampled_workers(traced))
    if in_one:
        followers = {w: Follower("main", "main", shared=True) for w in follow}
        setup = Setup(("main",), followers)
        pools = dict.fromkeys(workers, "main")
        return Scheme(pools, setup=setup, nodes=ids_by_site(traced), main=main_samplers(traced))
    train = {w: plan.place_of(w, "train").pool for w in workers}
    generate = {w: plan.place_of(w, "generate").pool for w in workers}
    steps = plan.pipeline
    followers = {w: Follower(train[w], generate[w], train[w] == generate[w] and not steps.staleness) for w in follow}
    return Scheme(
        train,
        generate,
        relaxed_calls(traced),
        {pool: frozenset(said.sizes) for pool, said in (memory or {}).items()},
        Setup(
            tuple(plan.pools),
            followers,
            steps.staleness,
            steps.order,
            steps.window,
            steps.publish,
            steps.chunks,
            dict(memory or {}),
        ),
        ids_by_site(traced),
        main_samplers(traced),
    )
