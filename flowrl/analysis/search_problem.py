"""The search for a placement, asked for a traced program: its workers' uses, their work, and what waits for what."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from ..errors import PlanError
from ..graph.check_program import stale
from ..graph.may_see_older_weights import trained_on
from ..graph.record import Graph
from ..placement.cluster.cluster import Cluster
from ..placement.cost.cost_model import Costs
from ..placement.cost.roofline import Roofline
from ..placement.cost.work import Work
from ..placement.plan.plan import Plan
from ..placement.search.find_placement import Found, Refined, search
from ..placement.search.problem import Member, Problem
from ..placement.search.step_time import Placed
from ..schedule.report.figures import title_of, totals
from ..schedule.simulation import Simulation
from .check_plan import short_caches, too_long
from .plan_settings import refined
from .study import Study

_TRIED_STEPS = 24  # that are simulated to tell settings apart
_TOKENS = 128  # a context is a multiple of
_FEW_STEPS, _MANY_ROWS = 12, 1024  # where each is an average of so many rows, and no more than two are open at a time


def problem_of(study: Study, graph: Graph, cluster: Cluster, staleness: Sequence[int] = (0,)) -> Problem:
    """Return what the search needs to know of a program on a cluster.

    A stage is what no data edge of a step puts in an order: calls of the same depth. A worker that is trained and
    generates has two uses, which may share a pool or not.
    """
    members: dict[tuple[str, str], list[Work]] = {}
    for work in study.works.values():
        if study.calls[work.node].step >= 0 and work.kind != "none":
            members.setdefault((work.role.name, work.use), []).append(work)
    found = tuple(
        Member(study.roles[worker], use, tuple(works), processes=_processes(works, cluster))
        for (worker, use), works in members.items()
    )
    names = {m.name for m in found}
    pairs = tuple(
        (f"{name}.train", f"{name}.generate")
        for name, role in study.roles.items()
        if role.trains and {f"{name}.train", f"{name}.generate"} <= names
    )
    nodes = [w.node for m in found for w in m.works]
    inside, stages = tuple(node for node in study.works if node in set(nodes)), _stages(graph, nodes)
    trains = {node for node in nodes if study.calls[node].call.op.cost == "train"}
    segments = _segments(graph, stages, trains)
    return Problem(
        cluster,
        found,
        stages,
        pairs,
        tuple(staleness),
        order=inside,
        segments=segments,
        followers=tuple(_followers(study, found)),
    )


def find_plan(
    study: Study, graph: Graph, cluster: Cluster, staleness: Sequence[int], *, steps: int | None = None
) -> Found:
    """Return the best plan of a program on a cluster; its step is what :meth:`Study.simulate` finds of ``steps``.

    Raises PlanError when a worker fits nowhere.
    """

    if wrong := next(too_long(study), None):
        raise wrong

    costs = study.costs or Roofline(cluster)
    flights, problem = _Flights(study, costs, steps, staleness), problem_of(study, graph, cluster, staleness)

    def settled(plan: Plan, seconds: float) -> Refined:
        """Settings are told apart by a few steps, as placements are; all steps are flown of the best alone."""
        return refined(study, _with_contexts(study, plan), seconds, staleness, flights.soon)

    def found_in(problem: Problem) -> Found:
        return search(problem, costs, simulated=flights.soon, refine=settled, confirmed=flights.whole)

    try:
        found = found_in(problem)
    except PlanError as error:
        if not any(m.use == "train" for m in problem.placed):
            raise
        try:  # what fits with weights, gradients and optimizer in host memory alone
            found = found_in(replace(problem, offload=True))
        except PlanError:
            raise error from None
    best, runner_up = (
        placed and flights.told(replace(placed, plan=_with_contexts(study, placed.plan)))
        for placed in (found.best, found.runner_up)
    )
    assert best is not None, "a search that finds nothing raises"
    return replace(found, best=best, runner_up=runner_up)


def _with_contexts(study: Study, plan: Plan) -> Plan:
    """Return the plan with a ``context`` for each engine whose KV cache holds no row of all positions of its model."""
    for worker, place, size, token, _ in list(short_caches(study.under(plan))):
        context = int(size / token) // _TOKENS * _TOKENS
        if context and "context" not in place.options:
            options = {**place.options, "context": context}
            plan = plan.placing(worker, "generate", replace(place, options=options))
    return plan


class _Flights:
    """Plans of a study on the virtual clock, each flown once: all steps, or as many as tell plans apart."""

    def __init__(self, study: Study, costs: Costs, steps: int | None, staleness: Sequence[int]) -> None:
        self._study, self._costs, self._steps = study, costs, steps
        self._known: list[tuple[Plan, int | None, Simulation]] = []
        rows = max((work.load.rows for work in study.works.values() if work.kind == "generate"), default=0)
        self._few = _FEW_STEPS if rows >= _MANY_ROWS and max(staleness) <= 1 else _TRIED_STEPS

    def whole(self, plan: Plan) -> float:
        """Return the step of a plan, of all steps."""
        return self._flown(plan, self._steps).step_seconds

    def soon(self, plan: Plan) -> float:
        """Return the same of a few."""
        return self._flown(plan, min(self._steps or self._few, self._few)).step_seconds

    def told(self, placed: Placed) -> Placed:
        """Return a placement with what its simulation says of pools and calls."""
        flown = self._flown(placed.plan, self._steps)
        busy = {pool.name: pool.busy for pool in flown.pools}
        parts = dict[tuple[str, str], float]()
        for total in totals(flown):
            key = (title_of(total.node), total.pool)
            parts[key] = parts.get(key, 0.0) + total.share
        return replace(placed, simulated_busy=busy, simulated_ops=parts)

    def _flown(self, plan: Plan, steps: int | None) -> Simulation:
        found = next((f for other, n, f in self._known if n == steps and other == plan), None)
        if found is None:
            found = replace(self._study.under(plan), costs=self._costs).simulate(steps)
            self._known.append((plan, steps, found))
        return found


def _followers(study: Study, members: Sequence[Member]) -> Iterator[tuple[str, str]]:
    """Yield workers whose calls take no time, such as an average of weights, with one of that model that trains."""
    called = {made.call.worker for made in study.calls.values()}
    leaders = [m.role for m in members if m.use == "train" and m.role.model is not None]
    for name, role in study.roles.items():
        if name not in called or role.model is None or any(m.role.name == name for m in members) or not leaders:
            continue
        alike = [leader for leader in leaders if leader.model == role.model and leader.trains]
        yield name, max(alike or leaders, key=lambda leader: leader.generates).name  # the policy rather than a critic


def _processes(works: Sequence[Work], cluster: Cluster) -> int:
    """Processes of the host for rows of user code: as many as there are devices, and no more than rows."""
    return max(1, min(cluster.size, *(work.load.rows for work in works)))


def _stages(graph: Graph, nodes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Nodes by depth: one more than the deepest worker's call that it takes data from."""
    wanted = set(nodes)
    depth: dict[str, int] = {}
    for node in graph.nodes:  # in program order
        before = [e.src for e in graph.edges if e.dst == node.id and e.kind in ("data", "order")]
        depth[node.id] = max((depth.get(b, 0) + (b in wanted) for b in before), default=0)
    levels = sorted({depth[n] for n in nodes})
    return tuple(tuple(n for n in nodes if depth[n] == level) for level in levels)


def _segments(graph: Graph, stages: Sequence[Sequence[str]], trains: Container[str]) -> tuple[int, ...]:
    """Return the segment of each stage: one begins where every call waits for all calls of the stages before.

    So it is behind updates alone, which have all of their rows: in chunks other calls begin with some.
    """
    above: dict[str, set[str]] = {}
    for node in graph.nodes:  # in program order
        before = [e.src for e in graph.edges if e.dst == node.id and e.kind in ("data", "order")]
        above[node.id] = {a for b in before for a in (b, *above.get(b, ()))}
    found, segment = list[int](), 0
    for i in range(len(stages)):
        earlier = {node for s in stages[:i] for node in s}
        whole = {node for node in stages[i] if node in trains}
        after = all(node in trains or whole <= above[node] for s in stages[i + 1 :] for node in s)
        waits = whole == set(stages[i]) and after and all(earlier <= above[node] for s in stages[i:] for node in s)
        segment += bool(i) and waits
        found.append(segment)
    return tuple(found)


def corrects(study: Study) -> bool:
    """Whether every loss of the program corrects for rows that are older than the weights, or says that it need not."""
    return bool(trained_on(study.traced)) and not stale(study.traced, 1)
