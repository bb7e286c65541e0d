"""The graph as a Mermaid flowchart, which GitHub and many documentation tools draw inside Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..record import Graph
from . import palette
from .picture import Box, Line, Picture, draw

_ARROWS = {"weights": "-.->", "order": "-.->", "control": "-.->", "carried": "==>", "serves": "--o"}
_DASHES = {
    "weights": ",stroke-dasharray:6 4,stroke-width:2px",
    "order": ",stroke-dasharray:1 4",
    "control": ",stroke-dasharray:2 3",
}
_SHAPES = {"library": ("([", "])"), "source": ("[/", "/]"), "worker": ("[[", "]]"), "move": ("{{", "}}")}


def render(graph: Graph) -> str:
    """A Mermaid flowchart of the graph."""
    return "\n".join(_rows(draw(graph))) + "\n"


def _rows(picture: Picture) -> Iterator[str]:
    ids = {box.id: f"n{number}" for number, box in enumerate(picture.boxes)}
    groups = {group.name: f"g{number}" for number, group in enumerate(picture.groups)}
    yield "flowchart TB"
    yield from (f"  {_box(box, ids)}" for box in picture.boxes if box.group is None)
    for group in picture.groups:
        yield f'  subgraph {groups[group.name]}["{_words(": ".join(filter(None, (group.name, group.kind))))}"]'
        yield from (f"    {_box(picture.box(id), ids)}" for id in group.boxes)
        yield "  end"
    yield from (f"  {_line(line, ids, groups)}" for line in picture.lines)
    yield from (f"  {row}" for row in _styles(picture, ids, groups))


def _box(box: Box, ids: dict[str, str]) -> str:
    before, after = _SHAPES.get(box.role, ("[", "]"))
    words = "<br/>".join(_words(text) for text in (box.title, *box.rows, *box.conditions))
    return f'{ids[box.id]}{before}"{words}"{after}'


def _line(line: Line, ids: dict[str, str], groups: dict[str, str]) -> str:
    edge = line.edge
    start = groups.get(edge.src) if edge.kind == "serves" else None
    text = (*line.label, *line.conditions)
    label = f'|"{"<br/>".join(map(_words, text))}"|' if text else ""
    return f"{start or ids[edge.src]} {_ARROWS.get(edge.kind, '-->')}{label} {ids[edge.dst]}"


def _styles(picture: Picture, ids: dict[str, str], groups: dict[str, str]) -> Iterator[str]:
    """A class per worker for its boxes, a style for each frame, and what the arrows cannot say."""
    yield _class("library", palette.NEUTRAL, palette.NEUTRAL.tint)
    for group in picture.groups:
        hue, name = palette.hue_of_group(group), groups[group.name]
        if not group.pool:
            yield _class(f"c{name}", hue, palette.PAPER)
            yield f"class {_members(group.boxes, ids)} c{name}"
        yield f"style {name} fill:{hue.tint},stroke:{hue.edge},color:{hue.ink}"
    for *_, hue in picture.workers:
        mine = [box for box in picture.boxes if box.hue == hue]
        yield _class(f"w{hue}", palette.hue_of(mine[0], picture), palette.fill_of(mine[0], picture))
        yield f"class {_members((box.id for box in mine), ids)} w{hue}"
    loose = [box.id for box in picture.boxes if palette.hue_of(box, picture) == palette.NEUTRAL]
    yield from [f"class {_members(loose, ids)} library"] if loose else []
    updates = [ids[box.id] for box in picture.boxes if box.role == "update"]
    yield from ["classDef update stroke-width:3px", f"class {','.join(updates)} update"] if updates else []
    rare = [ids[box.id] for box in picture.boxes if box.condition]
    yield from ["classDef rare stroke-dasharray:4 3", f"class {','.join(rare)} rare"] if rare else []
    for number, line in enumerate(picture.lines):
        yield f"linkStyle {number} stroke:{palette.ink_of(line, picture)}{_DASHES.get(line.edge.kind, '')}"


def _class(name: str, hue: palette.Hue, fill: str) -> str:
    return f"classDef {name} fill:{fill},stroke:{hue.edge},color:{palette.INK}"


def _members(boxes: Iterable[str], ids: dict[str, str]) -> str:
    return ",".join(ids[id] for id in boxes)


def _words(text: str) -> str:
    """Text for inside quotes: what Mermaid, Markdown or HTML could read as theirs becomes a code."""
    plain = " ".join(text.split())
    return "".join(c if c.isalnum() or c in " .,:=%+-()/≤…·×" else "_" if c == "_" else f"#{ord(c)};" for c in plain)
