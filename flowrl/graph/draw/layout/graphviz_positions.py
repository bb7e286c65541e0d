"""Where everything stands: Graphviz, by way of pygraphviz, places what has a known size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import FlowError
from ..dot import names, source
from ..picture import Picture
from .box_sizes import Size

Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A rectangle by its upper left corner: ``Rect(8, 8, 120, 40)``. In points, y downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def center(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Route:
    """A line: Bezier curves (1 + 3n points) up to where the arrow head begins, and the tip of the head."""

    points: tuple[Point, ...]
    tip: Point
    label: Point | None = None


@dataclass(frozen=True)
class Layout:
    """The places of a picture, by id."""

    width: float
    height: float
    boxes: Mapping[str, Rect]
    groups: Mapping[str, Rect]
    titles: Mapping[str, Point]  # the centre of the title of a group
    routes: Mapping[str, Route] = field(default_factory=dict[str, Route])


def place(picture: Picture, sizes: Mapping[str, Size], weights: int = 1) -> Layout:
    """Lay the picture out, weights edges as straight as ``weights`` says. Raises FlowError without pygraphviz."""
    try:
        from pygraphviz import AGraph  # type: ignore[reportUnknownVariableType]
    except ImportError as error:
        raise FlowError(
            "drawing as svg or html needs pygraphviz, which is not installed.",
            fix="pip install pygraphviz (it brings Graphviz along), or use --format text, mermaid or dot.",
        ) from error
    graph: Any = AGraph(string=source(picture, sizes, weights))
    return _read(json.loads(graph.draw(format="json0", prog="dot")), picture)


def _read(record: Mapping[str, Any], picture: Picture) -> Layout:
    _, _, width, height = _numbers(record["bb"])
    boxes: dict[str, Rect] = {}
    groups: dict[str, Rect] = {}
    titles: dict[str, Point] = {}
    called = {name: id for id, name in names(picture, plain=True).items()}
    for thing in record.get("objects", ()):
        name = called[thing["name"]]
        if "bb" in thing:
            left, low, right, high = _numbers(thing["bb"])
            groups[name] = Rect(left, height - high, right - left, high - low)
            titles[name] = _point(thing["lp"], height)
        else:
            x, y = _point(thing["pos"], height)
            w, h = 72 * float(thing["width"]), 72 * float(thing["height"])
            boxes[name] = Rect(x - w / 2, y - h / 2, w, h)
    back = {line.id: line.back and line.edge.src != line.edge.dst for line in picture.lines}
    routes = {edge["id"]: _route(edge, height, back[edge["id"]]) for edge in record.get("edges", ())}
    return Layout(width, height, boxes, groups, titles, routes)


def _route(edge: Mapping[str, Any], height: float, back: bool) -> Route:
    tip: Point | None = None
    points: list[Point] = []
    for word in edge["pos"].split():
        if word[0] in "es":
            tip = _point(word[2:], height)
        else:
            points.append(_point(word, height))
    if back:
        points.reverse()
    label = _point(edge["lp"], height) if "lp" in edge else None
    return Route(tuple(points), tip or points[-1], label)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _point(text: str, height: float) -> Point:
    x, y = _numbers(text)
    return x, height - y
