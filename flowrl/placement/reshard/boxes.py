"""Boxes, which are parts of weights: what two have in common, what is left of one, and one in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

#: A range along each dim, first and behind the last; ``()`` is the one number of a weight without dims.
Box = tuple[tuple[int, int], ...]


def volume(box: Box) -> int:
    """Return how many numbers are in a box."""
    return prod(b - a for a, b in box)


def shared(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one weight have in common; None is nothing."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(low < high for low, high in both) else None


def without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield what is left of a box, as boxes that have nothing in common; ``hole`` lies inside of it.

    >>> list(without(((0, 4), (0, 6)), ((1, 4), (0, 2))))
    [((0, 1), (0, 6)), ((1, 4), (2, 6))]
    """
    for dim, ((low, high), (first, last)) in enumerate(zip(box, hole, strict=True)):
        if low < first:
            yield (*hole[:dim], (low, first), *box[dim + 1 :])
        if last < high:
            yield (*hole[:dim], (last, high), *box[dim + 1 :])


def split(box: Box, most: int) -> Iterator[Box]:
    """Yield a box in pieces of at most ``most`` numbers, each a run of rows where a row is not more than that.

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


def minus(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """Return boxes without what is in the holes."""
    left = list(boxes)
    for hole in holes:
        kept: list[Box] = []
        for box in left:
            both = shared(box, hole)
            kept += [box] if both is None else without(box, both)
        left = kept
    return left


def touching(boxes: Iterable[Box], other: Box) -> Iterator[Box]:
    """Yield what boxes have in common with another one."""
    return (both for box in boxes if (both := shared(box, other)) is not None)


def shown(box: Box) -> str:
    """Return a box as it would be written behind the name of a tensor: ``0:32, 64:128``."""
    return ", ".join(f"{a}:{b}" for a, b in box)
