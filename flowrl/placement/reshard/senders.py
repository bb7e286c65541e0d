"""Which box of which weight goes from which process to which: one plan, for forecasts and for runs.

A process takes from itself what it holds, and lacks the rest. The bytes that it receives are counted from what it
lacks; the moves are the same boxes, cut where holders begin and end, each with the process that sends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import PlanError
from .boxes import Box, minus, shared, shown, touching, volume, without

#: The boxes that one process holds, or is to have, by weight. Boxes may overlap.
Holding = Mapping[str, Sequence[Box]]
Boxes = tuple[Box, ...]
#: A box with the processes that hold all of it.
Held = tuple[Box, tuple[int, ...]]
#: The node of a process, as a number or a name.
Node = Callable[[int], object]
_Pair = tuple[int, int]  # what is wanted and what the same process holds, as objects


@dataclass(frozen=True, slots=True)
class Move:
    """One box on its way: ``Move("model.norm.weight", source=3, target=0, box=((0, 32),))``."""

    name: str
    source: int
    target: int
    box: Box

    @property
    def local(self) -> bool:
        """Whether it stays in its process, so that nothing is sent."""
        return self.source == self.target

    @property
    def numbers(self) -> int:
        """How many numbers are in the box."""
        return volume(self.box)


@dataclass(frozen=True)
class Alike:
    """Weights that are cut alike, such as equal ones of many layers: who holds what of each, who is to have what.

    ``Alike(("a", "b"), held={0: (((0, 4),),), 1: (((4, 8),),)}, wanted={0: (((2, 6),),)})``: keys are processes. Those
    whose boxes are one object are computed once.
    """

    names: tuple[str, ...]
    held: Mapping[int, Boxes]
    wanted: Mapping[int, Boxes]
    _counts: dict[_Pair, int] = field(default_factory=dict[_Pair, int], compare=False, repr=False)
    _lacks: dict[_Pair, tuple[Boxes, Boxes]] = field(default_factory=dict[_Pair, Any], compare=False, repr=False)
    _cuts: dict[_Pair, tuple[Held, ...]] = field(default_factory=dict[_Pair, Any], compare=False, repr=False)

    def count(self, target: int) -> int:
        """Return how many numbers of a weight a target lacks."""
        wanted, own = self.wanted[target], self.held.get(target, ())
        key = id(wanted), id(own)
        if key not in self._counts:
            if len(wanted) == 1 and len(own) <= 1:  # nothing has to be cut to be counted
                both = shared(wanted[0], own[0]) if own else None
                self._counts[key] = volume(wanted[0]) - (volume(both) if both is not None else 0)
            else:
                self._counts[key] = sum(map(volume, self.lacks(target)[1]))
        return self._counts[key]

    def lacks(self, target: int) -> tuple[Boxes, Boxes]:
        """Return what a target has itself and what it lacks; no two boxes overlap."""
        wanted, own = self.wanted[target], self.held.get(target, ())
        key = id(wanted), id(own)
        if key not in self._lacks:
            here: list[Box] = []
            lacking: list[Box] = []
            for number, box in enumerate(wanted):
                left = minus([box], wanted[:number]) if volume(box) else []
                for hole in own:
                    here += touching(left, hole)
                    left = minus(left, [hole])
                lacking += left
            self._lacks[key] = tuple(here), tuple(lacking)
        return self._lacks[key]

    def pieces(self, target: int) -> tuple[Held, ...]:
        """Return what a target lacks, cut so that each piece has the same holders. Raises PlanError if one has none."""
        key = id(self.wanted[target]), id(self.held.get(target, ()))
        if key not in self._cuts:
            found: list[Held] = []
            for box in self.lacks(target)[1]:
                pieces: list[Held] = [(box, ())]
                for hole, holders in self._holders:
                    if shared(box, hole) is not None:
                        pieces = [part for piece, have in pieces for part in _cut(piece, have, hole, holders)]
                found += pieces
            self._cuts[key] = tuple(found)
            self._check(target, found)
        return self._cuts[key]

    @cached_property
    def _holders(self) -> tuple[Held, ...]:
        found: dict[Box, list[int]] = {}
        for process in sorted(self.held):
            for box in dict.fromkeys(self.held[process]):
                if volume(box):
                    found.setdefault(box, []).append(process)
        return tuple(sorted((box, tuple(processes)) for box, processes in found.items()))

    def _check(self, target: int, pieces: Iterable[Held]) -> None:
        for piece, have in pieces:
            if not have:
                raise PlanError(
                    f"process {target} is to have {self.names[0]}[{shown(piece)}], and no process holds it.",
                    have=sorted({f"[{shown(box)}]" for box, _ in self._holders}) or "nothing of that name",
                    fix="Give the weights of all processes of the source, under the names of the checkpoint.",
                )


@dataclass(frozen=True)
class MovePlan:
    """All that every process is to have, each number once, from a process that holds it.

    ``MovePlan((alike, ...))``. What a process holds it takes from itself, the rest from the holders in its own ``node``
    where there are any, and of those from the one that sent least so far. The same for the same input, wherever it is
    computed.
    """

    parts: tuple[Alike, ...]
    node: Node | None = None

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Numbers from other processes, by process."""
        found: Counter[int] = Counter()
        for part in self.parts:
            for target in part.wanted:
                found[target] += part.count(target) * len(part.names)
        return found

    @cached_property
    def inside(self) -> int:
        """Numbers that come from another process of the own node; there has to be a ``node``."""
        return sum(len(part.names) * self._near(part) for part in self.parts)

    def moves(self) -> Iterator[Move]:
        """Yield the moves in the order of weights, then of targets; for a large model, millions.

        Raises PlanError for a box that nobody holds.
        """
        sent: Counter[int] = Counter()
        owner = {name: part for part in self.parts for name in part.names}
        targets = {id(part): sorted(part.wanted) for part in self.parts}
        for name in sorted(owner):
            part = owner[name]
            for target in targets[id(part)]:
                yield from (Move(name, target, target, box) for box in part.lacks(target)[0])
                for box, holders in part.pieces(target):
                    source = min(self._close(holders, target), key=lambda r: (sent[r], r))
                    sent[source] += volume(box)
                    yield Move(name, source, target, box)

    def _near(self, part: Alike) -> int:
        """Numbers of one weight that targets lack and a process of their node holds."""
        assert self.node is not None, "nodes are known"
        by_node: dict[object, dict[Box, None]] = {}
        for process, boxes in part.held.items():
            by_node.setdefault(self.node(process), {}).update(dict.fromkeys(boxes))
        known: dict[tuple[int, object], int] = {}  # by what is lacking, an object that the part keeps, and node
        found = 0
        for target in part.wanted:
            lacking, here = part.lacks(target)[1], self.node(target)
            key = id(lacking), here
            if key not in known:
                known[key] = part.count(target) - sum(map(volume, minus(lacking, by_node.get(here, ()))))
            found += known[key]
        return found

    def _close(self, holders: Sequence[int], target: int) -> Sequence[int]:
        """The holders in the node of the target, or all of them."""
        if self.node is None:
            return holders
        here = self.node(target)
        return [r for r in holders if self.node(r) == here] or holders


def plan_boxes(held: Mapping[int, Holding], wanted: Mapping[int, Holding], *, node: Node | None = None) -> MovePlan:
    """Return the plan from what processes say that they hold to what they are to have; keys are processes.

    >>> plan = plan_boxes({0: {"w": [((0, 4),)]}, 1: {"w": [((4, 8),)]}}, {0: {"w": [((2, 6),)]}})
    >>> list(plan.moves())
    [Move(name='w', source=0, target=0, box=((2, 4),)), Move(name='w', source=1, target=0, box=((4, 6),))]
    """
    alike: dict[object, tuple[list[str], dict[int, Boxes], dict[int, Boxes]]] = {}
    same: dict[Boxes, Boxes] = {}
    for name in sorted({n for holding in wanted.values() for n in holding}):
        there, asked = (
            {r: same.setdefault(boxes := tuple(h[name]), boxes) for r, h in sorted(side.items()) if name in h}
            for side in (held, wanted)
        )
        key = tuple(there.items()), tuple(asked.items())
        alike.setdefault(key, ([], there, asked))[0].append(name)
    return MovePlan(tuple(Alike(tuple(names), there, asked) for names, there, asked in alike.values()), node)


def _cut(piece: Box, have: tuple[int, ...], hole: Box, holders: tuple[int, ...]) -> Iterator[Held]:
    """A piece cut where the box of further holders begins and ends."""
    both = shared(piece, hole)
    if both is None:
        yield piece, have
        return
    yield both, (*have, *(r for r in holders if r not in have))
    yield from ((rest, have) for rest in without(piece, both))
