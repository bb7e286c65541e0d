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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..cost.cost_model import Costs
from ..plan.plan import Plan
from .abstract_problem import Asked
from .binding_constraints import binding as binding_of
from .binding_constraints import nothing_fits
from .branch_and_bound import cheapest
from .neighbours import Candidate, climbed
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
        """0.25 when the runner-up takes 1.25 times as long, 0 where it takes no longer; None without one."""
        if self.runner_up is None or not self.step_seconds:
            return None
        return max(0.0, self.runner_up.step_seconds / self.step_seconds - 1)

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
    confirmed: Callable[[Plan], float] | None = None,
) -> Found:
    """Return the best placement of a problem. Without ``why`` it does not look for the constraint that binds.

    ``simulated``: the step of a plan in a simulation, by which the best candidates are put in order; ``refine`` tries
    other settings of theirs; ``confirmed`` simulates the best for all steps, where the others look at a few. Where rows
    have lengths of their own, placements near the best are simulated too. Raises PlanError when a use fits nowhere,
    with its name and the fewest devices that would do.
    """
    asked = Asked(problem, costs)
    answer = cheapest(asked.question(), asked.table, keep=CANDIDATES if simulated else 0)
    if answer.best is None:
        raise nothing_fits(problem, costs)
    choices = [answer.best, *(c for c in (answer.runner_up, *answer.ranked) if c is not None and c != answer.best)]
    both, tried = [Candidate.of(asked, choice) for choice in dict.fromkeys(choices)], 0
    if simulated is not None:
        both = _simulated([*both, *_overlapping(asked)], simulated)
        if asked.varies:
            both = sorted([min(climbed(both[0], simulated), key=_step), *both[1:]], key=_step)
        both, tried = _with_settings(both, refine) if refine is not None else (both, 0)
        both = _confirmed(both, confirmed) if confirmed is not None else both
    best, chosen = both[0].placed, both[0].choice
    runner_up = next((c.placed for c in both if c.choice.sets != chosen.sets), None)
    binding, gain = binding_of(both[0].asked, chosen) if why else ("none", 0.0)
    level = changes(best, runner_up) if runner_up is not None else ()
    bound = asked.bound() if simulated is not None and not _mixed(best.plan) else None
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


def _mixed(plan: Plan) -> bool:
    """Whether a pool has devices of several kinds, which is no placement that the bound is of."""
    cluster = plan.cluster
    pools = (pool.devices for pool in plan.pools.values())
    return cluster is not None and any(len({cluster.kind(d).name for d in devices}) > 1 for devices in pools)


def _step(candidate: Candidate) -> float:
    return candidate.placed.step_seconds


def _overlapping(asked: Asked) -> list[Candidate]:
    """The best placements in which the steps in flight keep the engines full, where rows have lengths of their own.

    What is reckoned of one generate alone has its longest row in it, which others hide where steps overlap.
    """
    full = asked.steady()
    if full is None:
        return []
    ranked = cheapest(full.overlapped(), full.table, keep=CANDIDATES).ranked
    return [Candidate.of(full, choice) for choice in ranked if choice.staleness]


def _simulated(candidates: Sequence[Candidate], simulated: Callable[[Plan], float]) -> list[Candidate]:
    """Candidates with the steps of simulations, the fastest first; of equal ones the first stays first."""
    found: list[Candidate] = []
    for candidate in candidates:
        if all(candidate.placed.plan != other.placed.plan for other in found):
            found.append(candidate.taking(simulated(candidate.placed.plan)))
    return sorted(found, key=_step)


def _confirmed(both: list[Candidate], confirmed: Callable[[Plan], float]) -> list[Candidate]:
    """The best and the best that shares pools in another way, simulated for all steps, the faster one first.

    Of two that are as fast in three digits it is the one with fewer settings of its own.
    """
    first = both[0]
    second = next((c for c in both if c.choice.sets != first.choice.sets), None)
    pair = [c.taking(confirmed(c.placed.plan)) for c in (first, second) if c is not None]
    return sorted(pair, key=lambda c: (float(f"{_step(c):.2e}"), len(c.placed.settings), _step(c)))


def _with_settings(both: list[Candidate], refine: Callable[[Plan, float], Refined]) -> tuple[list[Candidate], int]:
    """Return the placements with their best settings, the fastest first, and how many settings were tried.

    No setting makes a step shorter than its busiest pool is busy: what cannot come first or second by that is left.
    """
    found, tried = list[Candidate](), 0
    for candidate in both:
        placed = candidate.placed
        ahead = sorted(_step(c) for c in [*found, *both[len(found) :]])
        if tried < REFINED and placed.least < ahead[min(1, len(ahead) - 1)]:
            better = refine(placed.plan, placed.step_seconds)
            tried += better.tried
            bound = better.plan.pipeline.staleness
            placed = replace(placed, plan=better.plan, staleness=bound, settings=better.settings)
            placed = replace(placed, step_seconds=better.step_seconds)
        found.append(replace(candidate, placed=placed))
    return sorted(found, key=_step), tried


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
