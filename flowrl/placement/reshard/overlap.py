"""How many bytes each part of one layout has in common with each part of another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..model.weight_layout import Box, Layout


def overlaps(src: Layout, dst: Layout) -> list[dict[int, int]]:
    """Return bytes by ``src`` shard and by ``dst`` shard, pairs without any left out.

    >>> from ..cluster.mesh import Mesh; from ..model.model_shape import ModelShape
    >>> model = ModelShape.uniform(layers=1, columns=12, dtype_bytes=1)
    >>> overlaps(Layout(model, Mesh.of("tp=2")), Layout(model, Mesh.of("tp=3")))
    [{0: 4, 1: 2}, {1: 2, 2: 4}]
    """
    found: list[dict[int, int]] = [{} for _ in src.shards]
    for number in range(len(src.model.stacks)):
        theirs = list(owners(dst, number).items())
        level = _Level([(box, i) for i, (box, _) in enumerate(theirs)])
        for box, mine in owners(src, number).items():
            for other, size in level.touching(box):
                size *= src.model.dtype_bytes
                shards = theirs[other][1]
                for a in mine:
                    row = found[a]
                    for b in shards:
                        row[b] = row.get(b, 0) + size
    return found


def owners(layout: Layout, number: int) -> dict[Box, list[int]]:
    """Return the different parts of one stack, and the shards that hold each. They have nothing in common."""
    found: dict[Box, list[int]] = {}
    for shard, boxes in enumerate(layout.shards):
        if boxes[number]:
            found.setdefault(boxes[number], []).append(shard)
    return found


class _Level:
    """Numbered boxes by their range along dim 0, below that along dim 1 and so on, to find those that touch another."""

    def __init__(self, boxes: Sequence[tuple[Box, int]], dim: int = 0) -> None:
        self.dim = dim
        parts: dict[tuple[int, int], list[tuple[Box, int]]] = {}
        for box, i in boxes:
            parts.setdefault(box[dim], []).append((box, i))
        self.ranges = sorted(parts)
        self.stops = [stop for _, stop in self.ranges]
        assert all(a[1] <= b[0] for a, b in pairwise(self.ranges)), "two parts of a weight are equal or apart"
        deeper = bool(boxes) and dim + 1 < len(boxes[0][0])
        self.below = [_Level(parts[r], dim + 1) if deeper else parts[r][0][1] for r in self.ranges]

    def touching(self, box: Box, size: int = 1) -> Iterator[tuple[int, int]]:
        """Yield which boxes touch another one, and how many numbers they share."""
        low, high = box[self.dim]
        for k in range(bisect_right(self.stops, low), len(self.ranges)):
            start, stop = self.ranges[k]
            if start >= high:
                return
            both, below = size * (min(stop, high) - max(start, low)), self.below[k]
            if isinstance(below, _Level):
                yield from below.touching(box, both)
            else:
                yield below, both
