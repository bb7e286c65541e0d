"""The most readable of several layouts of one picture.

Graphviz is fast and its result hangs on the order in which it is told of things, so it is asked many times,
and the layout with the least clutter is taken. The choice is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, permutations, product

from ..picture import Group, Line, Picture
from .box_sizes import Size
from .clutter import clutter
from .graphviz_positions import Layout, place

Lines = tuple[Line, ...]
Order = Callable[[Lines], Lines]
_ORDERS: tuple[Order, ...] = (lambda lines: lines, lambda lines: lines[::-1])
_WEIGHTS = (1, 0)  # how straight weights edges are to be


def arrange(picture: Picture, sizes: Mapping[str, Size]) -> Layout:
    """Try many arrangements, fewer for a large picture. Raises FlowError without pygraphviz."""
    work = max(1, len(picture.lines) * len(picture.boxes))
    tries = max(4, min(96, 36_000 // work))
    layouts: dict[object, Layout] = {}
    for groups, order, weights in _arrangements(picture.groups, tries):
        layout = place(replace(picture, groups=groups, lines=order(picture.lines)), sizes, weights)
        layouts.setdefault(tuple(sorted((id, box.x, box.y) for id, box in layout.boxes.items())), layout)
    return min(layouts.values(), key=lambda layout: round(clutter(layout, picture, sizes), 3))


def _arrangements(groups: tuple[Group, ...], count: int) -> Iterator[tuple[tuple[Group, ...], Order, int]]:
    """Yield as many arrangements as are asked for, spread evenly over the orders of the groups."""
    share = max(1, count // (len(_ORDERS) * len(_WEIGHTS)))
    every = list(islice(permutations(groups), 5040))
    step = max(1, len(every) // share)
    yield from islice(product(every[::step], _ORDERS, _WEIGHTS), count)
