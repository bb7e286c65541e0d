"""Placements near a good one: more devices in one pool and fewer in another, and engines on other meshes.

Where rows have lengths of their own, what the search reckons is an estimate, and the fastest placement may be a step
away from the best estimate. The simulator tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..plan.plan import Plan
from .abstract_problem import Asked
from .branch_and_bound import Choice, Set
from .colocate import Settled
from .step_time import Placed

NEAR = 24  # placements near the best that are simulated, about
_MESHES = 3  # other meshes of an engine


@dataclass(frozen=True)
class Candidate:
    """A choice of a question with its plan; ``other``: sets on other meshes than those that the question takes."""

    asked: Asked
    choice: Choice
    placed: Placed
    other: Mapping[Set, Settled] = field(default_factory=dict[Set, Settled])

    @staticmethod
    def of(asked: Asked, choice: Choice, other: Mapping[Set, Settled] | None = None) -> Candidate:
        """Return the choice with its plan."""
        return Candidate(asked, choice, asked.placed(choice, other), other or {})

    def taking(self, seconds: float) -> Candidate:
        """Return the same with the step of a simulation."""
        return replace(self, placed=replace(self.placed, step_seconds=seconds))


def climbed(best: Candidate, simulated: Callable[[Plan], float]) -> list[Candidate]:
    """Return what was simulated on the way from a placement to one that no neighbour is faster than."""
    seen = [best]
    while len(seen) < NEAR:
        before = best
        for near in neighbours(best):
            if any(near.placed.plan == other.placed.plan for other in seen):
                continue
            seen.append(near.taking(simulated(near.placed.plan)))
            best = min(best, seen[-1], key=lambda c: c.placed.step_seconds)
        if best is before:
            break
    return seen


def neighbours(at: Candidate) -> Iterator[Candidate]:
    """Yield placements with one pool a size larger or smaller, and with an engine on another mesh."""
    for spots in _spots(at):
        table, sets = at.asked.table, at.choice.sets
        there = all(table.settle(s, spot) for s, spot in zip(sets, spots, strict=True))
        if there and table.fits(sets, spots):
            yield Candidate.of(at.asked, replace(at.choice, spots=spots))
    for units, spot in zip(at.choice.sets, at.choice.spots, strict=True):
        for settled in at.asked.table.other_engines(units, spot, _MESHES):
            other = {**at.other, units: settled}
            changed = units not in at.other or settled.ways != at.other[units].ways
            if changed and at.asked.table.fits(at.choice.sets, at.choice.spots, other):
                yield Candidate.of(at.asked, at.choice, other)


def _spots(at: Candidate) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield allocations in which a pool has the next size, and another one of its stock what is left."""
    stocks = at.asked.question().stocks
    for i, (stock, count) in enumerate(at.choice.spots):
        sizes = stocks[stock].counts
        place = sizes.index(count)
        for size in sizes[max(0, place - 1) : place] + sizes[place + 1 : place + 2]:
            for j, (other, _) in enumerate(at.choice.spots):
                if i == j or other != stock:
                    continue
                taken = sum(n for k, (s, n) in enumerate(at.choice.spots) if s == stock and k not in (i, j))
                fits = [n for n in sizes if n <= stocks[stock].devices - taken - size]
                if fits:
                    spots = {i: (stock, size), j: (stock, fits[-1])}
                    yield tuple(spots.get(k, spot) for k, spot in enumerate(at.choice.spots))
