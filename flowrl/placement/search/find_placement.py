"""Finds the placement with the shortest step: which uses share a pool, how many devices each gets, in which mesh.

HybridFlow's algorithm 1 (arXiv 2409.19256, section 6), exact over partitions and allocations
(:mod:`flowrl.placement.search.branch_and_bound`), with the meshes of its algorithm 2
(:mod:`flowrl.placement.search.colocate`). Departures:

- the trained and the generating copy of a worker are placed apart or together, and a publish between them is paid for;
- steps may overlap, by the staleness bounds of the problem;
- devices may be of several kinds, each pool being of one kind and of nodes of one size;
- pools are parts of a node, or whole nodes, so that no pool shares a node in part; some devices may stay unused.

Stages are barriers here: a stage ends with its slowest pool. A schedule may differ: :func:`resimulated` puts the step
that the simulator finds in the place of the one reckoned here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..cost.cost_model import Costs
from ..plan.plan import Plan
from .abstract_problem import Asked
from .binding_constraints import binding as binding_of
from .binding_constraints import nothing_fits
from .branch_and_bound import cheapest
from .problem import Problem
from .step_time import Change, Placed, changes

ROOFLINE_ERROR = 0.30  # assumed; a roofline has no measurement to compare with


@dataclass(frozen=True)
class Found:
    """A placement, the best of another shape, and why.

    ``binding``: ``memory``, ``node size``, ``divisibility``, ``none`` or ``unknown``: the constraint without which
    the same sets would take the shortest step, ``gain`` the part of the step that this would save. ``margin``: by what
    part the step of the runner-up is longer; ``error`` of the costs. ``evaluated`` allocations, ``pruned`` branches.
    """

    problem: Problem
    best: Placed
    runner_up: Placed | None
    source: str
    error: float
    binding: str
    gain: float
    changes: tuple[Change, ...]
    evaluated: int
    pruned: int

    @property
    def plan(self) -> Plan:
        """The plan of the best."""
        return self.best.plan

    @property
    def step_seconds(self) -> float:
        """Seconds per step of the best."""
        return self.best.step_seconds

    @property
    def margin(self) -> float | None:
        """0.25 when the runner-up takes 1.25 times as long; None without one."""
        if self.runner_up is None or not self.step_seconds:
            return None
        return self.runner_up.step_seconds / self.step_seconds - 1

    @property
    def tie(self) -> bool:
        """Whether the costs cannot tell the two apart."""
        return self.margin is not None and self.margin <= self.error


def error_of(costs: Costs) -> float:
    """Return the error that costs state, as a part of a prediction; given costs are exact, a roofline is ±30 %."""
    stated = getattr(costs, "error", None)
    if isinstance(stated, float):
        return stated
    return 0.0 if costs.source.startswith("given") else ROOFLINE_ERROR


def search(problem: Problem, costs: Costs, *, why: bool = True) -> Found:
    """Return the best placement of a problem. Without ``why`` it does not look for the constraint that binds.

    Raises PlanError when a use fits nowhere, with its name and the fewest devices that would do.
    """
    asked = Asked(problem, costs)
    answer = cheapest(asked.question(), asked.table)
    if answer.best is None:
        raise nothing_fits(problem, costs)
    best = asked.placed(answer.best)
    runner_up = asked.placed(answer.runner_up) if answer.runner_up is not None else None
    binding, gain = binding_of(asked, answer.best) if why else ("none", 0.0)
    level = changes(best, runner_up) if runner_up is not None else ()
    looked_at = answer.evaluated, answer.pruned
    return Found(problem, best, runner_up, costs.source, error_of(costs), binding, gain, level, *looked_at)


def resimulated(found: Found, step_seconds: Callable[[Plan], float]) -> Found:
    """Return the same with the steps that a simulation of both plans finds; the faster of the two is then the best."""
    if found.runner_up is None:
        return replace(found, best=replace(found.best, step_seconds=step_seconds(found.plan)))
    both = [replace(p, step_seconds=step_seconds(p.plan)) for p in (found.best, found.runner_up)]
    best, runner_up = sorted(both, key=lambda p: p.step_seconds)  # of equal ones the first stays first
    swapped = best.sets != found.best.sets
    return replace(
        found,
        best=best,
        runner_up=runner_up,
        binding="unknown" if swapped else found.binding,
        gain=0.0 if swapped else found.gain,
        changes=changes(best, runner_up),
    )


def search_shapes(
    problem: Problem, costs: Costs, shapes: Mapping[str, Iterable[Iterable[str]]]
) -> dict[str, Placed | None]:
    """Return the best allocation of each named partition into sets of members; None where it does not fit."""
    asked = Asked(problem, costs)
    found: dict[str, Placed | None] = {}
    for name, sets in shapes.items():
        units = asked.sets_of(sets)
        choice = cheapest(replace(asked.question(), only=(units,)), asked.table).best
        found[name] = asked.placed(choice) if choice is not None else None
    return found
