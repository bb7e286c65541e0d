"""Why a step takes as long as it does: its critical path, what would shorten it, why the next best plan is slower."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..placement.cost.roofline import Roofline
from ..placement.plan.plan import Plan
from ..placement.search.find_placement import Found
from ..schedule.report.figures import duration, percent, title_of
from ..schedule.simulation import Bar, Simulation
from .call_seconds import Faster
from .search_problem import corrects
from .study import Study

_LEAST = 1e-9  # seconds; below, a gap is rounding
_WORTH = 0.001  # of a step; what saves less is left out


@dataclass(frozen=True)
class Stretch:
    """A node on the critical path: ``Stretch("actor.generate", seconds=6.0, share=0.55)`` of a step."""

    node: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Change:
    """``Change("one more step in flight: staleness 2", step_seconds=5.5, saved=0.15)``, a part of the step."""

    what: str
    step_seconds: float
    saved: float


@dataclass(frozen=True)
class Term:
    """A node on which the runner-up loses: ``Term("actor.update", seconds=12.0, other=28.6)`` of the two paths."""

    node: str
    seconds: float
    other: float


@dataclass(frozen=True)
class Explained:
    """The critical path with the longest first, changes with the best first, and what the figures rest on.

    ``lost_on``: of a search, where the runner-up loses, the most first.
    """

    step_seconds: float
    path: tuple[Stretch, ...]
    changes: tuple[Change, ...]
    uncertain: tuple[str, ...]
    lost_on: tuple[Term, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield it in words."""
        for at in self.path:
            yield f"critical path: {at.node}, {duration(at.seconds)} of a step, {percent(at.share)}"
        for change in self.changes:
            yield f"{change.what}: a step of {duration(change.step_seconds)}, {percent(change.saved)} less"
        if not self.changes:
            yield "nothing that was tried makes a step shorter"
        for term in self.lost_on:
            other, ours = duration(term.other), duration(term.seconds)
            yield f"the runner-up loses on {term.node}: {other} of its critical path, here {ours}"
        yield from (f"uncertain: {what}" for what in self.uncertain)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, and in words."""
        return {**asdict(self), "words": list(self.lines())}


def explained(study: Study, flown: Simulation, steps: int | None = None) -> Explained:
    """Explain the simulation of a study, of as many ``steps``: the changes are simulated like it."""
    whole = flown.step_seconds
    tried = [(what, other.simulate(steps).step_seconds) for what, other in _others(study)]
    changes = [Change(what, seconds, 1 - seconds / whole) for what, seconds in tried if whole]
    worth = sorted((c for c in changes if c.saved > _WORTH), key=lambda c: -c.saved)
    return Explained(whole, critical_path(flown), tuple(worth), tuple(_uncertain(study)))


def explained_search(study: Study, found: Found, steps: int | None = None) -> Explained:
    """Explain the best plan of a search for a study, and on which nodes the runner-up is slower."""
    best = study.under(found.plan)
    flown = best.simulate(steps)
    terms: tuple[Term, ...] = ()
    if found.runner_up is not None:
        terms = lost_on(flown, study.under(found.runner_up.plan).simulate(steps))
    return replace(explained(best, flown, steps), lost_on=terms)


def lost_on(best: Simulation, other: Simulation) -> tuple[Term, ...]:
    """Return the nodes that take more of the other's critical path than of the best one's, the most first."""
    ours, theirs = ({at.node: at.seconds for at in critical_path(flown)} for flown in (best, other))
    terms = [Term(node, ours.get(node, 0.0), seconds) for node, seconds in theirs.items()]
    worth = [term for term in terms if term.other - term.seconds > _WORTH * best.step_seconds]
    return tuple(sorted(worth, key=lambda term: term.seconds - term.other))


def critical_path(flown: Simulation) -> tuple[Stretch, ...]:
    """Return the nodes on the chain of what waited for what, from the last thing that ended back to the middle.

    The middle of the run, as the first steps are not steady. Shares are parts of that time; what is left over is
    waiting for nothing that took time.
    """
    bars = sorted((bar for bar in flown.bars if bar.end > bar.start), key=lambda bar: bar.end)
    if not bars:
        return ()
    ends, found = [bar.end for bar in bars], dict[str, float]()
    begin, here = flown.makespan / 2 if flown.steps > 3 else 0.0, bars[-1]
    while True:
        found[here.node] = found.get(here.node, 0.0) + here.end - max(here.start, begin)
        before = _before(here, bars, ends) if here.start > begin + _LEAST else None
        if before is None or before.end <= begin:
            break
        here = before
    whole = bars[-1].end - begin
    shares = {node: seconds / whole for node, seconds in found.items() if whole}
    order = sorted(shares, key=lambda node: -shares[node])
    return tuple(Stretch(node, shares[node] * flown.step_seconds, shares[node]) for node in order)


def _before(bar: Bar, bars: Sequence[Bar], ends: Sequence[float]) -> Bar | None:
    """What ended when a bar began: what it says that it waited for, else in its pool, else the last to end before."""
    last = bisect_right(ends, bar.start + _LEAST)
    ended = [b for b in bars[bisect_right(ends, bar.start - _LEAST) : last] if b is not bar and b.start < bar.start]
    if not ended:
        return bars[last - 1] if last and bars[last - 1].start < bar.start else None
    return max(ended, key=lambda b: (title_of(b.node) == bar.because, b.pool == bar.pool))


def _others(study: Study) -> Iterator[tuple[str, Study]]:
    """The same program with one thing faster, and what that is."""
    plan, costs = study.plan, study.cost_model
    for name, pool in plan.pools.items():
        if pool.devices:
            more = len(pool.devices) + 1
            what = f"one more device in pool '{name}', if its calls scale with it"
            yield what, replace(study, costs=Faster(costs, 1 - 1 / more, pool=name))
        elif pool.processes:
            pools = {**plan.pools, name: replace(pool, processes=pool.processes + 1)}
            yield f"one more process in pool '{name}'", study.under(_with(plan, pools=pools))
    if isinstance(costs, Roofline) and plan.cluster is not None:
        e = costs.efficiency
        if plan.cluster.nodes > 1:
            yield (
                "a network twice as fast",
                replace(study, costs=replace(costs, efficiency=replace(e, network=2 * e.network))),
            )
        yield (
            "links in a node twice as fast",
            replace(study, costs=replace(costs, efficiency=replace(e, link=2 * e.link))),
        )
        yield (
            "a way to the host twice as fast",
            replace(study, costs=replace(costs, efficiency=replace(e, host=2 * e.host))),
        )
    if corrects(study) and any(plan.split(worker) for worker in study.roles):
        bound = plan.pipeline.staleness + 1
        ahead = _with(plan, pipeline=replace(plan.pipeline, staleness=bound))
        yield f"one more step in flight: staleness {bound}", study.under(ahead)
    if (bound := plan.pipeline.staleness) > 0:
        behind = plan.but(pipeline=replace(plan.pipeline, staleness=bound - 1))
        yield f"one step less in flight: staleness {bound - 1}", study.under(behind)


def _with(plan: Plan, **changed: Any) -> Plan:
    parts = {"pools": plan.pools, "place": plan.place, "cluster": plan.cluster, "pipeline": plan.pipeline}
    return Plan(**{**parts, **changed}, file=plan.file)


def _uncertain(study: Study) -> Iterator[str]:
    """What the seconds rest on and nobody has measured."""
    if isinstance(study.cost_model, Roofline):
        yield "every second is a roofline's, which is taken as right to 30 % (assumed)"
    lengths = study.tokens
    if not lengths.numbers:
        yield "how long responses are: nobody said it, so all are taken as long as may be"
    elif lengths.kind == "fixed":
        yield "how long responses are: all alike was said, and a long tail takes longer"
    for worker, use, place in study.plan.roles():
        title = study.plan.title_of(worker, use)
        if place.mesh["pp"] > 1 and use == "train":
            yield f"the pipeline of {title}: its bubble is a formula, and its stages are taken as equal"
        if place.mesh.experts["ep"] > 1:
            yield f"the experts of {title}: tokens are taken to choose them evenly"
