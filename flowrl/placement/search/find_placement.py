"""Finds the placement with the shortest step: which uses share a pool, how many devices each gets, in which mesh.

HybridFlow's algorithm 1 (arXiv 2409.19256, section 6), exact over partitions and allocations
(:mod:`flowrl.placement.search.branch_and_bound`), with the meshes of its algorithm 2
(:mod:`flowrl.placement.search.colocate`). Departures:

- the trained and the generating copy of a worker are placed apart or together, and a publish between them is paid for;
- steps may overlap, by the staleness bounds of the problem;
- devices may be of several kinds, each pool being of one kind and of nodes of one size;
- pools are parts of a node, or whole nodes, so that no pool shares a node in part; some devices may stay unused.

Stages are barriers here: a stage ends with its slowest pool. A schedule may differ, so the best of each of several
partitions and staleness bounds are simulated, and their steps, their order and the winner are those of the simulator.
Chunks, publish modes, KV caches and offload are tried there, on these placements alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..cost.cost_model import Costs
from ..plan.plan import Plan
from .abstract_problem import Asked
from .binding_constraints import binding as binding_of
from .binding_constraints import nothing_fits
from .branch_and_bound import Choice, cheapest
from .problem import Problem
from .step_time import Change, Placed, changes

CANDIDATES = 8  # partitions and staleness bounds whose best is simulated
REFINED = 60  # simulations of other settings of these, about; the fastest come first
ROOFLINE_ERROR = 0.30  # assumed; a roofline has no measurement to compare with


@dataclass(frozen=True)
class Refined:
    """A plan with the settings that make its step shortest: ``Refined(plan, 28.5, tried=12, settings=("chunks: 4",))``.

    ``tried``: how many other settings were simulated.
    """

    plan: Plan
    step_seconds: float
    tried: int
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """A placement, the best of another shape, and why.

    ``binding``: ``memory``, ``node size``, ``divisibility`` or ``none``: the constraint without which the same sets
    would take the shortest step, ``gain`` the part of the step that this would save. ``margin``: by what part the step
    of the runner-up is longer; ``error`` of the costs. ``evaluated`` allocations, ``pruned`` branches.
    ``bound``: seconds that no placement of the space takes less than in the simulator. ``tried``: how many other
    settings of the best placements were simulated.
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
    bound: float | None = None
    tried: int = 0

    @property
    def gap(self) -> float | None:
        """By what part of the bound the best may be longer than a faster one that was missed; None without a bound."""
        return None if not self.bound else max(0.0, self.step_seconds / self.bound - 1)

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
    """Return the error that costs state, as a part of a prediction; given costs are exact, a roofline is ±30 %.

    A roofline that was fitted to a run has the error that it had there.
    """
    stated = getattr(costs, "error", None)
    if isinstance(stated, float):
        return stated
    return 0.0 if costs.source.startswith("given") else ROOFLINE_ERROR


def search(
    problem: Problem,
    costs: Costs,
    *,
    why: bool = True,
    simulated: Callable[[Plan], float] | None = None,
    refine: Callable[[Plan, float], Refined] | None = None,
) -> Found:
    """Return the best placement of a problem. Without ``why`` it does not look for the constraint that binds.

    ``simulated``: the step of a plan in a simulation, by which the best candidates are put in order; ``refine`` tries
    other settings of theirs. Raises PlanError when a use fits nowhere, with its name and the fewest devices that would
    do.
    """
    asked = Asked(problem, costs)
    answer = cheapest(asked.question(), asked.table, keep=CANDIDATES if simulated else 0)
    if answer.best is None:
        raise nothing_fits(problem, costs)
    choices = [answer.best, *(c for c in (answer.runner_up, *answer.ranked) if c is not None and c != answer.best)]
    both, tried = [(choice, asked.placed(choice)) for choice in dict.fromkeys(choices)], 0
    if simulated is not None:
        both = [(choice, replace(p, step_seconds=simulated(p.plan))) for choice, p in both]
        both.sort(key=lambda pair: pair[1].step_seconds)  # of equal ones the first stays first
        both, tried = _with_settings(both, refine) if refine is not None else (both, 0)
    chosen, best = both[0]
    runner_up = next((p for c, p in both if c.sets != chosen.sets), None)
    binding, gain = binding_of(asked, chosen) if why else ("none", 0.0)
    level = changes(best, runner_up) if runner_up is not None else ()
    bound = asked.bound() if simulated is not None else None
    return Found(
        problem,
        best,
        runner_up,
        costs.source,
        error_of(costs),
        binding,
        gain,
        level,
        answer.evaluated,
        answer.pruned,
        bound,
        tried,
    )


def _with_settings(
    both: list[tuple[Choice, Placed]], refine: Callable[[Plan, float], Refined]
) -> tuple[list[tuple[Choice, Placed]], int]:
    """Return the placements with their best settings, the fastest first, and how many settings were tried.

    No setting makes a step shorter than its busiest pool is busy: what cannot come first or second by that is left.
    """
    found, tried = list[tuple[Choice, Placed]](), 0
    for choice, placed in both:
        ahead = sorted(p.step_seconds for _, p in [*found, *both[len(found) :]])
        if tried < REFINED and placed.least < ahead[min(1, len(ahead) - 1)]:
            better = refine(placed.plan, placed.step_seconds)
            tried += better.tried
            bound = better.plan.pipeline.staleness
            placed = replace(placed, plan=better.plan, staleness=bound, settings=better.settings)
            placed = replace(placed, step_seconds=better.step_seconds)
        found.append((choice, placed))
    return sorted(found, key=lambda pair: pair[1].step_seconds), tried


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
