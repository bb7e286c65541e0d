"""How hard a layout is to read, as a number: crossings, lines through foreign boxes, covered words, bends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise

from ..picture import Picture
from .box_sizes import Size
from .graphviz_positions import Layout, Point, Rect, Route

Bounds = tuple[float, float, float, float]
Piece = tuple[Point, Point]
_WIDE = 1340.0  # points that a screen has across
_STEPS = 6  # straight pieces per Bezier curve


def clutter(layout: Layout, picture: Picture, sizes: Mapping[str, Size]) -> float:
    """The lower, the easier to read. Comparable between layouts of one picture only."""
    bends = {id: flat(route) for id, route in layout.routes.items()}
    words = _words(layout, sizes)
    return (
        1.0 * _crossings(bends)
        + 4.0 * _through_boxes(bends, layout, picture)
        + 1.5 * _through_words(bends, words)
        + 0.04 * sum(gap(bends[id], word) for id, word in words.items() if id in bends)
        + 0.3 * sum(straddles(word, group) for word in words.values() for group in layout.groups.values())
        + 1.3 * sum(map(_turning, bends.values()))
        + 0.004 * sum(map(_length, bends.values()))
        + 0.00001 * layout.width * layout.height
        + 0.02 * max(0.0, layout.width - 1.4 * layout.height)
        + 0.2 * max(0.0, layout.width - _WIDE)
    )


def _crossings(bends: Mapping[str, list[Point]]) -> int:
    tracks = [(_bounds(points), list(pairwise(points[1:-1]))) for points in bends.values()]
    return sum(meet(a, b) and _cross(_inside(p, b), _inside(q, a)) for (a, p), (b, q) in combinations(tracks, 2))


def _inside(pieces: list[Piece], box: Bounds) -> list[Piece]:
    """The straight pieces that may reach into a box."""
    left, top, right, low = box
    return [
        (p, q)
        for p, q in pieces
        if (p[0] < right or q[0] < right)
        and (p[0] > left or q[0] > left)
        and (p[1] < low or q[1] < low)
        and (p[1] > top or q[1] > top)
    ]


def _cross(a: list[Piece], b: list[Piece]) -> bool:
    """Whether two lines cross away from their ends."""
    return any(_sides(p, q, r) * _sides(p, q, s) < 0 > _sides(r, s, p) * _sides(r, s, q) for p, q in a for r, s in b)


def _through_boxes(bends: Mapping[str, list[Point]], layout: Layout, picture: Picture) -> int:
    """Lines through boxes that are not their ends, and through groups that neither end belongs to."""
    home = {box.id: box.group for box in picture.boxes}
    count = 0
    for line in picture.lines:
        ends = {line.edge.src, line.edge.dst}
        homes = {home.get(end, end) for end in ends}
        foreign = [rect for name, rect in layout.groups.items() if name not in homes]
        foreign += [rect for id, rect in layout.boxes.items() if id not in ends]
        count += sum(enters(bends[line.id], rect) for rect in foreign)
    return count


def _through_words(bends: Mapping[str, list[Point]], words: Mapping[str, Rect]) -> int:
    lines = sum(enters(points, rect) for id, points in bends.items() for name, rect in words.items() if id != name)
    rects = sum(meet(edges_of(a), edges_of(b)) for a, b in combinations(words.values(), 2))
    return lines + 2 * rects


def _words(layout: Layout, sizes: Mapping[str, Size]) -> dict[str, Rect]:
    places = {id: route.label for id, route in layout.routes.items() if route.label}
    places |= {f"title of {name}": at for name, at in layout.titles.items()}
    return {id: word_rect(at, sizes[id]) for id, at in places.items()}


def word_rect(at: Point, size: Size) -> Rect:
    """The letters of words whose room has that middle."""
    return Rect(at[0] - size[0] / 2 + 3, at[1] - size[1] / 2 + 2, size[0] - 6, size[1] - 4)


def enters(points: list[Point], rect: Rect) -> bool:
    """Whether a line comes into a rectangle."""
    left, top, right, low = edges_of(rect)
    if not meet(_bounds(points), (left, top, right, low)):
        return False
    return any(left < x < right and top < y < low for x, y in points)


def gap(points: list[Point], word: Rect) -> float:
    """How far words are from their line, beyond the 8 points that are no harm."""
    left, top, right, low = edges_of(word)
    near = (math.hypot(max(left - x, x - right, 0), max(top - y, y - low, 0)) for x, y in points)
    return max(0.0, min(near) - 8.0)


def straddles(word: Rect, group: Rect) -> bool:
    """Whether words lie on the edge of a group."""
    a, b = edges_of(word), edges_of(group)
    inside = b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]
    return meet(a, b) and not inside


def _turning(points: list[Point]) -> float:
    """Radians turned along the line."""
    angles = [math.atan2(q[1] - p[1], q[0] - p[0]) for p, q in pairwise(points) if p != q]
    return sum(abs(math.remainder(b - a, math.tau)) for a, b in pairwise(angles))


def _length(points: list[Point]) -> float:
    return sum(math.dist(p, q) for p, q in pairwise(points))


def flat(route: Route) -> list[Point]:
    """The route as straight pieces."""
    points = route.points
    flat = [points[0]]
    for start in range(0, len(points) - 1, 3):
        flat.extend(_bezier(points[start : start + 4]))
    return [*flat, route.tip]


def _bezier(curve: tuple[Point, ...]) -> Iterator[Point]:
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = curve
    for number in range(1, _STEPS + 1):
        t = number / _STEPS
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        yield a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy


def _sides(p: Point, q: Point, r: Point) -> float:
    return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])


def _bounds(points: list[Point]) -> Bounds:
    across, down = [x for x, _ in points], [y for _, y in points]
    return min(across), min(down), max(across), max(down)


def edges_of(rect: Rect) -> Bounds:
    """Left, top, right and low."""
    return rect.x, rect.y, rect.x + rect.width, rect.y + rect.height


def meet(a: Bounds, b: Bounds) -> bool:
    """Whether two rectangles have a point in common."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
