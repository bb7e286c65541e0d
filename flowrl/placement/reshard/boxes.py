"""Which box of which weight goes from which process to which, whatever engines hold them and however they are cut.

Where :mod:`flowrl.placement.reshard.planner` plans for layouts that it knows, this plans for what processes say that
they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...errors import PlanError

#: A range along each dim, first and behind the last; ``()`` is the one number of a weight without dims.
Box = tuple[tuple[int, int], ...]
#: The boxes that one process holds, or is to have, by weight. Boxes may overlap.
Holding = Mapping[str, Sequence[Box]]


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


def plan_boxes(
    held: Mapping[int, Holding], wanted: Mapping[int, Holding], *, node: Callable[[int], int] | None = None
) -> tuple[Move, ...]:
    """All that every process is to have, each number once, from a process that holds it.

    >>> plan_boxes({0: {"w": [((0, 4),)]}, 1: {"w": [((4, 8),)]}}, {0: {"w": [((2, 6),)]}})
    (Move(name='w', source=0, target=0, box=((2, 4),)), Move(name='w', source=1, target=0, box=((4, 6),)))

    Keys are processes: what one holds itself it takes from itself, the rest from the holders in its own ``node`` where
    there are any, and of those from the one that sent least so far. The same for the same input, wherever it is
    computed; moves are in the order of weights, then of targets. Raises PlanError for a box that nobody holds.
    """
    sent: Counter[int] = Counter()
    found: list[Move] = []
    known: dict[object, list[tuple[Box, tuple[int, ...]]]] = {}
    everybody = _holders(held)
    targets = sorted(wanted)
    for name in sorted({n for holding in wanted.values() for n in holding}):
        holders = everybody.get(name, ())
        for target in targets:
            mine = wanted[target].get(name, ())
            own = tuple(held.get(target, {}).get(name, ()))
            key = (holders, tuple(mine), own, target)  # layers that are equal are cut equally
            if key not in known:
                known[key] = list(_cut(name, target, mine, own, holders))
            for box, ranks in known[key]:
                source = target if target in ranks else _chosen(ranks, target, sent, node)
                if source != target:
                    sent[source] += volume(box)
                found.append(Move(name, source, target, box))
    return tuple(found)


def volume(box: Box) -> int:
    """How many numbers are in a box."""
    return prod(b - a for a, b in box)


def shared(a: Box, b: Box) -> Box | None:
    """What two boxes of one weight have in common; None is nothing."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(low < high for low, high in both) else None


def without(box: Box, hole: Box) -> Iterator[Box]:
    """What is left of a box, as boxes that have nothing in common; ``hole`` lies inside of it.

    >>> list(without(((0, 4), (0, 6)), ((1, 4), (0, 2))))
    [((0, 1), (0, 6)), ((1, 4), (2, 6))]
    """
    for dim, ((low, high), (first, last)) in enumerate(zip(box, hole, strict=True)):
        if low < first:
            yield (*hole[:dim], (low, first), *box[dim + 1 :])
        if last < high:
            yield (*hole[:dim], (last, high), *box[dim + 1 :])


def split(box: Box, most: int) -> Iterator[Box]:
    """A box in pieces of at most ``most`` numbers, each a run of rows where a row is not more than that.

    >>> list(split(((0, 5), (0, 4)), 8))
    [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 5), (0, 4))]
    """
    if volume(box) <= max(1, most):
        yield box
        return
    (low, high), rest = box[0], box[1:]
    step = most // volume(rest)
    for first in range(low, high, max(1, step)):
        if step:
            yield ((first, min(high, first + step)), *rest)
        else:
            yield from (((first, first + 1), *inner) for inner in split(rest, most))


#: The different boxes of one weight, each with the processes that hold all of it.
_Holders = tuple[tuple[Box, tuple[int, ...]], ...]


def _holders(held: Mapping[int, Holding]) -> dict[str, _Holders]:
    found: dict[str, dict[Box, dict[int, None]]] = {}
    for rank in sorted(held):
        for name, boxes in held[rank].items():
            for box in boxes:
                if volume(box):
                    found.setdefault(name, {}).setdefault(box, {})[rank] = None
    return {name: tuple(sorted((box, tuple(ranks)) for box, ranks in at.items())) for name, at in found.items()}


def _cut(
    name: str, target: int, mine: Iterable[Box], own: Iterable[Box], holders: _Holders
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """What a target is to have, in pieces that have nothing in common, each with all who hold it."""
    taken: list[Box] = []
    for box in mine:
        left = _minus([box], taken) if volume(box) else []
        taken.append(box)
        for hole in own:
            yield from ((piece, (target,)) for piece in _touching(left, hole))
            left = _minus(left, [hole])
        pieces: list[tuple[Box, tuple[int, ...]]] = [(piece, ()) for piece in left]
        for hole, ranks in holders:
            pieces = [part for piece, have in pieces for part in _among(piece, have, hole, ranks)]
        for piece, have in pieces:
            if not have:
                raise PlanError(
                    f"process {target} is to have {name}[{shown(piece)}], and no process holds it.",
                    have=sorted({f"[{shown(b)}]" for b, _ in holders}) if holders else "nothing of that name",
                    fix="Give the weights of all processes of the source, under the names of the checkpoint.",
                )
            yield piece, have


def _among(
    piece: Box, have: tuple[int, ...], hole: Box, ranks: tuple[int, ...]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """A piece cut where the box of further holders begins and ends."""
    both = shared(piece, hole)
    if both is None:
        yield piece, have
        return
    yield both, (*have, *(r for r in ranks if r not in have))
    yield from ((rest, have) for rest in without(piece, both))


def _minus(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """Boxes without what is in the holes."""
    left = list(boxes)
    for hole in holes:
        kept: list[Box] = []
        for box in left:
            both = shared(box, hole)
            kept += [box] if both is None else without(box, both)
        left = kept
    return left


def _touching(boxes: Iterable[Box], other: Box) -> Iterator[Box]:
    return (both for box in boxes if (both := shared(box, other)) is not None)


def _chosen(ranks: Sequence[int], target: int, sent: Counter[int], node: Callable[[int], int] | None) -> int:
    """The holder that sends: of the target's node if there is one, of those the one that sent least."""
    if node is not None:
        here = node(target)
        ranks = [r for r in ranks if node(r) == here] or ranks
    return min(ranks, key=lambda r: (sent[r], r))


def shown(box: Box) -> str:
    """A box as it would be written behind the name of a tensor: ``0:32, 64:128``."""
    return ", ".join(f"{a}:{b}" for a, b in box)
