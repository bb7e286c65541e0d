"""Boxes that are apart, by their ranges along one dim after the other, to find those that touch another box."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from .boxes import Box


class BoxTree:
    """Numbered boxes by their range along dim 0, below that along dim 1 and so on: :meth:`of`."""

    def __init__(self, ranges: list[tuple[int, int]], below: list[BoxTree] | list[int], dim: int) -> None:
        self._ranges, self._below, self._dim = ranges, below, dim
        self._stops = [stop for _, stop in ranges]

    @staticmethod
    def of(boxes: Sequence[Box]) -> BoxTree | None:
        """Return the tree of different boxes; None unless their ranges along each dim are equal or apart.

        >>> tree = BoxTree.of([((0, 2), (0, 4)), ((2, 4), (0, 3)), ((2, 4), (3, 4))])
        >>> list(tree.touching(((1, 3), (2, 4))))
        [(0, 2), (1, 1), (2, 1)]
        >>> BoxTree.of([((0, 2),), ((1, 3),)]) is None
        True
        """
        return _tree([(box, number) for number, box in enumerate(boxes)], 0) if boxes and boxes[0] else None

    def touching(self, box: Box, size: int = 1) -> Iterator[tuple[int, int]]:
        """Yield which boxes touch another one, and how many numbers they share, in the order of their ranges."""
        low, high = box[self._dim]
        for k in range(bisect_right(self._stops, low), len(self._ranges)):
            start, stop = self._ranges[k]
            if start >= high:
                return
            both, below = size * (min(stop, high) - max(start, low)), self._below[k]
            if isinstance(below, BoxTree):
                yield from below.touching(box, both)
            else:
                yield below, both


def _tree(boxes: Sequence[tuple[Box, int]], dim: int) -> BoxTree | None:
    parts: dict[tuple[int, int], list[tuple[Box, int]]] = {}
    for box, number in boxes:
        parts.setdefault(box[dim], []).append((box, number))
    ranges = sorted(parts)
    if any(a[1] > b[0] for a, b in pairwise(ranges)):
        return None
    if dim + 1 == len(boxes[0][0]):
        return BoxTree(ranges, [parts[r][0][1] for r in ranges], dim)
    below = [tree for r in ranges if (tree := _tree(parts[r], dim + 1)) is not None]
    return BoxTree(ranges, below, dim) if len(below) == len(ranges) else None
