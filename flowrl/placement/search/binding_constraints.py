"""What limits a placement: the constraint that a better one would break, or the use that fits nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...errors import PlanError
from ..cluster.cluster import Cluster, Nodes
from ..cost.communication import publish_bytes
from ..cost.cost_model import Costs
from ..cost.roofline import Roofline
from .abstract_problem import Asked
from .branch_and_bound import Choice, cheapest
from .problem import Problem

_MATTERS = 0.005  # a constraint binds when a step without it is shorter by more than this part


def binding(asked: Asked, best: Choice) -> tuple[str, float]:
    """The constraint without which the same sets take the shortest step, and the part of the step that this saves."""
    problem, costs = asked.problem, asked.costs
    without = {
        "memory": Asked(problem, costs, frozenset({"memory"}), like=asked),
        "node size": Asked(problem, costs, anywhere=True, like=asked),
        "divisibility": Asked(problem, _of_any_mesh(costs), frozenset({"divisibility"}), like=asked),
    }
    gains: dict[str, float] = {}
    bound = cheapest(replace(asked.question(), only=(best.sets,)), asked.table).best or best
    for name, freer in without.items():
        choice = cheapest(replace(freer.question(), only=(best.sets,)), freer.table).best
        gains[name] = 1 - choice.seconds / bound.seconds if choice is not None and bound.seconds else 0.0
    name = max(gains, key=lambda n: gains[n])
    return (name, gains[name]) if gains[name] > _MATTERS else ("none", 0.0)


def nothing_fits(problem: Problem, costs: Costs) -> PlanError:
    """Return the largest use that fits nowhere, with the fewest devices of each kind on which it would."""
    asked = Asked(problem, costs)
    for unit, names in sorted(asked.units.items(), key=lambda item: -_parameters(problem, item[1])):
        spots = [(i, n) for i, stock in enumerate(asked.question().stocks) for n in stock.counts]
        if any(asked.table.settle((unit,), spot) for spot in spots):
            continue
        larger = Asked(replace(problem, cluster=_of_large_hosts(problem.cluster)), costs)
        if any(larger.table.settle((unit,), spot) for spot in spots):
            return PlanError(
                f"{' with '.join(names)} does not fit on {problem.cluster}: its hosts have no memory for what leaves "
                "the devices.",
                fix="Write host_memory: in the cluster if its nodes have more, or take more nodes.",
            )
        enough = [text for g in problem.cluster.groups if (text := _enough(problem, costs, names, g))]
        return PlanError(
            f"{' with '.join(names)} does not fit on {problem.cluster}, not even alone.",
            fix=f"It would fit on {' or '.join(dict.fromkeys(enough))}." if enough else "Take another kind of device.",
        )
    return PlanError(f"the uses do not fit on {problem.cluster}.", have=list(asked.units), fix="Add devices.")


def _parameters(problem: Problem, names: Iterable[str]) -> int:
    models = [problem.by_name[n].role.model for n in names]
    return max(m.parameters for m in models if m is not None)


def _enough(problem: Problem, costs: Costs, names: tuple[str, ...], group: Nodes) -> str:
    """``32 h100-80``: the fewest devices, in nodes like these, on which the members fit; empty beyond 1024 nodes."""
    nodes = 1
    while nodes <= 1024:
        larger = replace(problem, cluster=Cluster((replace(group, count=nodes),)), integers=False)
        asked = Asked(larger, _of_cluster(costs, larger.cluster))
        for count in (n for n in asked.question().stocks[0].counts if n > nodes // 2 * group.devices or nodes == 1):
            if asked.table.settle(("+".join(names),), (0, count)):
                return f"{count} {group.kind}"
        nodes *= 2
    return ""


def _of_large_hosts(cluster: Cluster) -> Cluster:
    """The same cluster with hosts that have memory for everything."""
    return Cluster(tuple(g if g.kind == "cpu" else replace(g, host_memory=1e18) for g in cluster.groups))


def _of_any_mesh(costs: Costs) -> Costs:
    """The same costs for meshes that do not divide a model: nothing can be planned to move, so bytes are reckoned."""
    return replace(costs, received=publish_bytes) if isinstance(costs, Roofline) else costs


def _of_cluster(costs: Costs, cluster: Cluster) -> Costs:
    """The same costs for another cluster, where they know one."""
    return replace(costs, cluster=cluster) if isinstance(costs, Roofline) else costs
