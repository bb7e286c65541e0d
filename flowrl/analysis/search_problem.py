"""The search for a placement, asked for a traced program: its workers' uses, their work, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.record import Graph
from ..placement.cluster.cluster import Cluster
from ..placement.cost.work import Work
from ..placement.search.problem import Member, Problem
from ..schedule.fly_program import Made
from .study import Study


def problem_of(study: Study, graph: Graph, cluster: Cluster, staleness: Sequence[int] = (0,)) -> Problem:
    """Return what the search needs to know of a program on a cluster.

    A stage is what no data edge of a step puts in an order: calls of the same depth. A worker that is trained and
    generates has two uses, which may share a pool or not.
    """
    members: dict[tuple[str, str], list[Work]] = {}
    for work in study.works.values():
        if study.calls[work.node].step >= 0 and work.kind != "none":
            use = "generate" if work.kind == "generate" else "train"
            members.setdefault((work.role.name, use), []).append(work)
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
    return Problem(cluster, found, _stages(graph, nodes), pairs, tuple(staleness))


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


def corrects(study: Study) -> bool:
    """Whether every loss of the program corrects for rows that are older than the weights."""
    trains: list[Made] = [m for m in study.calls.values() if m.call.op.cost == "train"]
    sampled = [m for m in trains if m.call.worker in study.roles and study.roles[m.call.worker].generates]
    return bool(sampled) and all(getattr(m.call.arguments.get("loss"), "corrects_stale", False) for m in sampled)
