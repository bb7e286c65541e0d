"""Which box of which weight goes from which process to which: one plan, for forecasts and for runs.

A process takes from itself what it holds, and lacks the rest. Of what it lacks each piece comes from a process that
holds it (:mod:`flowrl.placement.reshard.dealing`). The bytes that pass a process are counted from the same pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import PlanError
from .box_tree import BoxTree
from .boxes import Box, minus, shared, shown, touching, volume, without
from .dealing import Lot, Node, Passing, Turns, deal, lots_of

#: The boxes that one process holds, or is to have, by weight. Boxes may overlap.
Holding = Mapping[str, Sequence[Box]]
Boxes = tuple[Box, ...]
#: A box with the processes that hold all of it.
Held = tuple[Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Move:
    """One box on its way: ``Move("model.norm.weight", source=3, target=0, box=((0, 32),))``.

    ``relayed``: the source does not hold it, and passes on to its node what it has got from another one.
    """

    name: str
    source: int
    target: int
    box: Box
    relayed: bool = False

    @property
    def local(self) -> bool:
        """Whether it stays in its process, so that nothing is sent."""
        return self.source == self.target

    @property
    def numbers(self) -> int:
        """How many numbers are in the box."""
        return volume(self.box)


@dataclass(frozen=True)
class Traffic:
    """Numbers that pass each process, to and from others in its node and to and from other nodes.

    Without nodes everything is inside. ``passed_on`` and ``taken_over`` are those of what is sent and received inside a
    node that came from another one, and so move after the rest.
    """

    sent_inside: Mapping[int, int]
    sent_between: Mapping[int, int]
    received_inside: Mapping[int, int]
    received_between: Mapping[int, int]
    passed_on: Mapping[int, int] = field(default_factory=dict[int, int])
    taken_over: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def sent(self) -> dict[int, int]:
        """Numbers to others, by process."""
        return dict(Counter(self.sent_inside) + Counter(self.sent_between))


@dataclass(frozen=True)
class Alike:
    """Weights that are cut alike, such as equal ones of many layers: who holds what of each, who is to have what.

    ``Alike(("a", "b"), held={0: (((0, 4),),), 1: (((4, 8),),)}, wanted={0: (((2, 6),),)})``: keys are processes. Those
    whose boxes are one object are computed once.
    """

    names: tuple[str, ...]
    held: Mapping[int, Boxes]
    wanted: Mapping[int, Boxes]
    _counts: dict[tuple[int, int], int] = field(default_factory=dict[Any, int], compare=False, repr=False)
    _cuts: dict[Boxes, tuple[Held, ...]] = field(default_factory=dict[Boxes, Any], compare=False, repr=False)

    def count(self, target: int) -> int:
        """Return how many numbers of a weight a target lacks."""
        wanted, own = self.wanted[target], self.held.get(target, ())
        key = id(wanted), id(own)
        if key not in self._counts:
            if len(wanted) == 1 and len(own) <= 1:  # nothing has to be cut to be counted
                both = shared(wanted[0], own[0]) if own else None
                self._counts[key] = volume(wanted[0]) - (volume(both) if both is not None else 0)
            else:
                self._counts[key] = sum(volume(box) for box, have in self.pieces(target) if target not in have)
        return self._counts[key]

    def pieces(self, target: int) -> tuple[Held, ...]:
        """Return what a target is to have, cut so that each piece has the same holders; no two overlap.

        Raises PlanError for a piece that nobody holds.
        """
        wanted = self.wanted[target]
        if wanted not in self._cuts:
            found = self._of_one(wanted[0]) if len(wanted) == 1 and volume(wanted[0]) else None
            self._cuts[wanted] = tuple(self._cut_by_all(target) if found is None else found)
        return self._cuts[wanted]

    def sizes(self, target: int) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Return how many numbers are in each of :meth:`pieces`, with its holders."""
        wanted = self.wanted[target]
        if len(wanted) == 1 and wanted not in self._cuts and self._tree is not None and volume(wanted[0]):
            found = [(size, self._holders[n][1]) for n, size in self._tree.touching(wanted[0])]
            if sum(size for size, _ in found) == volume(wanted[0]):
                return found
        return ((volume(box), have) for box, have in self.pieces(target))

    def _of_one(self, box: Box) -> list[Held] | None:
        """The pieces of a box among holders whose boxes are apart; None where they are not, or one lacks."""
        if self._tree is None:
            return None
        found: list[Held] = []
        for number, _ in self._tree.touching(box):
            hole, holders = self._holders[number]
            both = shared(box, hole)
            assert both is not None, "they touch"
            found.append((both, holders))
        return found if sum(volume(piece) for piece, _ in found) == volume(box) else None

    def _cut_by_all(self, target: int) -> list[Held]:
        """The pieces where holders have any boxes: each box that is wanted, cut where any of them begins or ends."""
        found: list[Held] = []
        wanted = self.wanted[target]
        for number, box in enumerate(wanted):
            pieces: list[Held] = [(left, ()) for left in minus([box], wanted[:number])] if volume(box) else []
            for hole, holders in self._holders:
                if shared(box, hole) is not None:
                    pieces = [part for piece, have in pieces for part in _cut(piece, have, hole, holders)]
            found += pieces
        self._check(target, found)
        return found

    def own(self, target: int) -> list[Box]:
        """Return what a target is to have and holds itself; no two boxes overlap."""
        found: list[Box] = []
        wanted = self.wanted[target]
        for number, box in enumerate(wanted if target in self.held else ()):
            left = minus([box], wanted[:number]) if volume(box) else []
            for hole in self.held[target]:
                found += touching(left, hole)
                left = minus(left, [hole])
        return found

    @cached_property
    def _holders(self) -> tuple[Held, ...]:
        found: dict[Box, list[int]] = {}
        for process in sorted(self.held):
            for box in dict.fromkeys(self.held[process]):
                if volume(box):
                    found.setdefault(box, []).append(process)
        return tuple(sorted((box, tuple(processes)) for box, processes in found.items()))

    @cached_property
    def _tree(self) -> BoxTree | None:
        return BoxTree.of([box for box, _ in self._holders])

    def _check(self, target: int, pieces: Iterable[Held]) -> None:
        for piece, have in pieces:
            if not have:
                raise PlanError(
                    f"process {target} is to have {self.names[0]}[{shown(piece)}], and no process holds it.",
                    have=sorted({f"[{shown(box)}]" for box, _ in self._holders}) or "nothing of that name",
                    fix="Give the weights of all processes of the source, under the names of the checkpoint.",
                )


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A box of each weight of a part on its way to the targets ``there``, the ``i``-th of ``count`` such.

    ``sources`` by weight and i; ``brings``: by weight the place of the target that gets it for all of them.
    """

    box: Box
    sources: Sequence[int]
    i: int
    count: int
    there: tuple[int, ...]
    brings: Sequence[int] = ()

    def move(self, name: str, number: int, target: int) -> Move:
        """Return the move of a weight to one of the targets."""
        if self.brings and (bringer := self.there[self.brings[number]]) != target:
            return Move(name, bringer, target, self.box, relayed=True)
        return Move(name, self.sources[number * self.count + self.i], target, self.box)


def _deal_lot(
    lot: Lot, groups: Sequence[tuple[int, ...]], first: int, weights: int, sent: Counter[int], turns: Turns
) -> Iterator[_Dealt]:
    """Who sends the box of a lot, of so many weights, to each group of targets that gets it once."""
    size = volume(lot.box)
    sources = deal(sent, lot.sources, size, weights * len(groups))
    sizes = sorted({len(there) for there in groups if len(there) > 1})
    brings = {count: turns.list(first, count, size, weights) for count in sizes}
    for i, there in enumerate(groups):
        yield _Dealt(lot.box, sources, i, len(groups), there, brings.get(len(there), ()))


@dataclass(frozen=True)
class MovePlan:
    """All that every process is to have, each number once, from a process that holds it.

    ``MovePlan((alike, ...))``. What a process holds it takes from itself, the rest from the holders in its own ``node``
    where there are any, and of those from the one that sent least so far. What a node has no holder of comes to it
    once: one of those there gets it, and passes it on to the others. The same for the same input, wherever it is
    computed and however weights are put together.
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
    def traffic(self) -> Traffic:
        """What passes each process, of the moves that :meth:`moves` yields."""
        passing = Passing(self.node)
        for part in self._together:
            for targets in _groups(part):
                passing.add(targets, part.sizes(targets[0]), len(part.names))
        near, inside, relayed = passing.near, passing.inside, (passing.passed_on, passing.taken_over)
        return Traffic(inside, passing.sent - inside, near, Counter(self.received) - near, *relayed)

    def moves(self) -> Iterator[Move]:
        """Yield the moves in the order of weights, then of targets; for a large model, millions.

        Raises PlanError for a box that nobody holds.
        """
        sent, turns = Counter[int](), Turns()
        found: list[tuple[str, list[Move]]] = []
        for part in self._together:
            found += self._moves_of(part, sent, turns)
        for _, moves in sorted(found, key=lambda pair: pair[0]):
            yield from moves

    def _moves_of(self, part: Alike, sent: Counter[int], turns: Turns) -> Iterator[tuple[str, list[Move]]]:
        """The moves of each weight of a part, targets in order, and of each what it has itself first."""
        dealt: dict[int, list[_Dealt]] = {}  # by target
        for targets in _groups(part):
            passed_on = Counter[int]()
            for lot in lots_of(targets, part.pieces(targets[0]), self.node):
                for one in _deal_lot(lot, lot.by_node(self.node), targets[0], len(part.names), sent, turns):
                    for target in one.there:
                        dealt.setdefault(target, []).append(one)
                    for place in one.brings:
                        passed_on[one.there[place]] += volume(lot.box) * (len(one.there) - 1)
            sent.update(passed_on)
        here = {target: part.own(target) for target in sorted(part.wanted)}
        order = {t: {box: i for i, (box, _) in enumerate(part.pieces(t))} for t in dealt}
        for target, boxes in dealt.items():
            boxes.sort(key=lambda one, place=order[target]: place[one.box])
        for number, name in enumerate(part.names):
            moves: list[Move] = []
            for target, own in here.items():
                moves += (Move(name, target, target, box) for box in own)
                moves += (one.move(name, number, target) for one in dealt.get(target, ()))
            yield name, moves

    @cached_property
    def _together(self) -> tuple[Alike, ...]:
        """The parts with all weights that are cut alike in one of them, in the order of their names."""
        known: dict[Boxes, Boxes] = {}
        alike: dict[object, tuple[list[str], dict[int, Boxes], dict[int, Boxes]]] = {}
        for part in self.parts:
            held, wanted = _without_nothing(part.held, known), _without_nothing(part.wanted, known)
            if wanted:
                key = tuple((p, id(boxes)) for side in (held, wanted) for p, boxes in side.items()), len(held)
                alike.setdefault(key, ([], held, wanted))[0].extend(part.names)
        found = (Alike(tuple(sorted(names)), held, wanted) for names, held, wanted in alike.values())
        return tuple(sorted(found, key=lambda part: part.names[0]))


def plan_boxes(held: Mapping[int, Holding], wanted: Mapping[int, Holding], *, node: Node | None = None) -> MovePlan:
    """Return the plan from what processes say that they hold to what they are to have; keys are processes.

    >>> plan = plan_boxes({0: {"w": [((0, 4),)]}, 1: {"w": [((4, 8),)]}}, {0: {"w": [((2, 6),)]}})
    >>> [(move.name, move.source, move.target, move.box) for move in plan.moves()]
    [('w', 0, 0, ((2, 4),)), ('w', 1, 0, ((4, 6),))]
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


def _groups(part: Alike) -> Iterable[list[int]]:
    """Targets that are to have the same boxes, in order."""
    groups: dict[Boxes, list[int]] = {}
    for target in sorted(part.wanted):
        groups.setdefault(part.wanted[target], []).append(target)
    return groups.values()


def _without_nothing(side: Mapping[int, Boxes], known: dict[Boxes, Boxes]) -> dict[int, Boxes]:
    """One side of a part by process in order, equal boxes as one object, without boxes that are empty."""
    objects: dict[int, Boxes] = {}
    found: dict[int, Boxes] = {}
    for process in sorted(side):
        boxes = side[process]
        if id(boxes) not in objects:
            full = tuple(box for box in boxes if volume(box))
            objects[id(boxes)] = known.setdefault(full, full)
        if objects[id(boxes)]:
            found[process] = objects[id(boxes)]
    return found


def _cut(piece: Box, have: tuple[int, ...], hole: Box, holders: tuple[int, ...]) -> Iterator[Held]:
    """A piece cut where the box of further holders begins and ends."""
    both = shared(piece, hole)
    if both is None:
        yield piece, have
        return
    yield both, (*have, *(r for r in holders if r not in have))
    yield from ((rest, have) for rest in without(piece, both))
