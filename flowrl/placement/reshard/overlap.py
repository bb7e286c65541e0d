"""How many bytes each part of one layout has in common with each part of another."""

from __future__ import annotations

from ..model.weight_layout import Box, Layout
from .box_tree import BoxTree


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
        level = BoxTree.of([box for box, _ in theirs])
        assert level is not None, "two parts of a weight are equal or apart"
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
