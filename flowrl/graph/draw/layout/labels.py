"""Words at lines, moved along them to where they hide the least: the long ones of a graph with its plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, product

from ..picture import Picture
from .box_sizes import Size
from .clutter import edges_of, flat, gap, meet, straddles, word_rect
from .graphviz_positions import Layout, Point, Rect

_SPACE = 5.0  # points between a line and its words
_SWEEPS = 2
_FINE = 2.0  # a cost below which words stay where Graphviz put them
_CELL = 32.0  # points across a cell of the index of lines


class _Lines:
    """The lines of a layout by id, and an index of the cells that each one passes through."""

    def __init__(self, points: Mapping[str, list[Point]]) -> None:
        self.points = points
        self._cells: dict[tuple[int, int], dict[str, list[Point]]] = {}
        for id, line in points.items():
            for x, y in line:
                self._cells.setdefault((int(x // _CELL), int(y // _CELL)), {}).setdefault(id, []).append((x, y))

    def entering(self, rect: Rect) -> int:
        """The number of lines that have a point inside a rectangle."""
        left, top, right, low = edges_of(rect)
        inside: set[str] = set()
        for column in range(int(left // _CELL), int(right // _CELL) + 1):
            for row in range(int(top // _CELL), int(low // _CELL) + 1):
                for id, points in self._cells.get((column, row), {}).items():
                    if id not in inside and any(left < x < right and top < y < low for x, y in points):
                        inside.add(id)
        return len(inside)


@dataclass(frozen=True)
class _Ground:
    """What words must keep away from: lines, boxes and titles, frames, the rim of the picture."""

    layout: Layout
    lines: _Lines
    boxes: tuple[Rect, ...]

    def cost(self, id: str, word: Rect, others: Collection[Rect], enough: float = math.inf) -> float:
        """Return how ill the words of a line stand there; 0 is fine. A cost above ``enough`` is a lower bound."""
        left, top, right, low = edges_of(word)
        outside = left < 0 or top < 0 or right > self.layout.width or low > self.layout.height
        cost = 30.0 * outside + 6.0 * self.lines.entering(word)
        if cost > enough:
            return cost
        covered = sum(meet((left, top, right, low), edges_of(rect)) for rect in chain(self.boxes, others))
        cost += 30.0 * covered + 4.0 * sum(straddles(word, group) for group in self.layout.groups.values())
        return cost if cost > enough else cost + 0.3 * gap(self.lines.points[id], word)


def settle_labels(layout: Layout, picture: Picture, sizes: Mapping[str, Size]) -> Layout:
    """The layout with words off other words, boxes, lines and frames, and still at their own line."""
    lines = _Lines({id: _dense(flat(route)) for id, route in layout.routes.items()})
    titles = (word_rect(at, sizes[f"title of {name}"]) for name, at in layout.titles.items())
    ground = _Ground(layout, lines, (*layout.boxes.values(), *titles))
    places = {line.id: at for line in picture.lines if (at := layout.routes[line.id].label)}
    for _ in range(_SWEEPS):
        for id, here in places.items():
            others = [word_rect(at, sizes[other]) for other, at in places.items() if other != id]
            places[id] = _best(id, here, ground, others, sizes[id])
    routes = {id: replace(r, label=places[id]) if id in places else r for id, r in layout.routes.items()}
    return replace(layout, routes=routes)


def _best(id: str, here: Point, ground: _Ground, others: Collection[Rect], room: Size) -> Point:
    """The best place for the words of a line, the nearer the better where some are equal."""
    best, least = here, ground.cost(id, word_rect(here, room), others)
    if least < _FINE:
        return here
    for at in sorted(_beside(ground.lines.points[id], room), key=lambda at: math.dist(at, here)):
        far = 0.01 * math.dist(at, here)
        if far >= least:
            break  # nothing farther off can be better
        cost = far + ground.cost(id, word_rect(at, room), others, enough=least - far)
        if cost < least:
            best, least = at, cost
    return best


def _beside(points: list[Point], room: Size) -> Iterator[Point]:
    """Middles for words of that size left, right, above and below of places on a line, away from its ends."""
    wide, high = room[0] / 2 + _SPACE - 4, room[1] / 2 + _SPACE - 2
    for x, y in islice(points, 2, len(points) - 3, 3):
        yield from ((x - wide, y), (x + wide, y), (x, y - high), (x, y + high))
        yield from product((x - wide, x + wide), (y - high, y - high / 2, y + high / 2, y + high))


def _dense(points: list[Point]) -> list[Point]:
    """The same line with a point every few points."""
    dense = points[:1]
    for p, q in pairwise(points):
        steps = max(1, round(math.dist(p, q) / _SPACE))
        dense += [(p[0] + (q[0] - p[0]) * n / steps, p[1] + (q[1] - p[1]) * n / steps) for n in range(1, steps + 1)]
    return dense
