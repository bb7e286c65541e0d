"""The graph as one self-contained SVG: Graphviz lays it out, this module draws it, the same on every machine.

Nothing in it points outside. Boxes, groups and lines carry ``data-id`` and a ``<title>`` that a browser shows
when they are hovered.
"""

from __future__ import annotations

from ..record import Graph
from . import legend, palette
from .layout.box_sizes import BAR, HEAD, LABEL, LEADING, METER, NOTE, Words, box_words, line_words, sizes
from .layout.choose_layout import arrange
from .layout.graphviz_positions import Layout, Point, Rect, Route
from .layout.labels import settle_labels
from .layout.single_column import column, column_svg
from .picture import NEXT_STEP, NEXT_STEPS, Box, Group, Line, Picture, draw
from .strokes import bar, call, curve, edge, head, number, opening, pointed, stroke, text, turn, words

WIDEST = 1420.0  # points: what a screen of 1440 can show with words of 11 pixels
_PAD = 14.0
COLUMN = 620.0  # of a graph that is too wide


def render(graph: Graph) -> str:
    """The SVG of the graph, with a legend; a column where it would be too wide. Raises FlowError without pygraphviz."""
    return picture_svg(draw(graph)) or column_svg(column(graph), wide=COLUMN)


def picture_svg(picture: Picture, *, with_legend: bool = True) -> str | None:
    """The SVG of a picture; None where no screen is wide enough for it to be read."""
    taken = sizes(picture)
    layout = arrange(picture, taken)
    if layout.width + 2 * _PAD > WIDEST:
        return None
    if any(group.pool for group in picture.groups):
        layout = settle_labels(layout, picture, taken)
    room = max(layout.width, 240.0)
    rows = legend.rows(picture, room) if with_legend else []
    wide, high = room + 2 * _PAD, layout.height + 2 * _PAD + (len(rows) * legend.ROW + 8 if rows else 0)
    parts = [
        *opening(picture, wide, high),
        f'<g transform="translate({number(_PAD + (room - layout.width) / 2)} {number(_PAD)})">',
        *(_group(group, layout) for group in picture.groups),
        *(_line(line, picture, layout.routes[line.id]) for line in picture.lines),
        *(_box(box, picture, layout.boxes[box.id]) for box in picture.boxes),
        *(_title(group, layout.titles[group.name]) for group in picture.groups),
        *(_label(line, picture, layout) for line in picture.lines if line_words(line)),
        "</g>",
        *_legend(rows, layout),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _group(group: Group, layout: Layout) -> str:
    hue = palette.hue_of_group(group)
    return (
        f'<g class="group" data-id="{text(group.name)}"><title>{text(group.tip)}</title>'
        f'<rect {_rect(layout.groups[group.name])} rx="9" fill="{hue.tint}" stroke="{hue.edge}"/></g>'
    )


def _title(group: Group, at: Point) -> str:
    """The title of a group; of a pool on a ground of its own, as lines come in below it, with a bar: how busy it is."""
    hue, id = palette.hue_of_group(group), text(group.name)
    name, kind = Words(group.name, HEAD, bold=True), Words(group.kind, NOTE)
    wide = name.width + 6 + kind.width + (METER + 8 if group.busy is not None else 0)
    left, base = at[0] - wide / 2, at[1] + HEAD * 0.35
    ground = _rect(Rect(left - 3, at[1] - HEAD * 0.7, wide + 6, HEAD * 1.4))
    paper = f'><rect {ground} fill="{hue.tint}" fill-opacity="0.92"/>' if group.pool else f" {_halo(hue.tint)}>"
    drawn = words(name, left, base, anchor="start")
    drawn += words(kind, left + name.width + 6, base, anchor="start") if kind.text else ""
    drawn += bar(left + wide - METER, at[1] - 1.5, METER, group.busy, hue.ink) if group.busy is not None else ""
    return f'<g class="group-title" data-id="{id}" pointer-events="none" fill="{hue.ink}"{paper}{drawn}</g>'


def _box(box: Box, picture: Picture, at: Rect) -> str:
    hue = palette.hue_of(box, picture)
    round = 12 if box.role in ("library", "source") else 5
    rows, drawn, breaks = box_words(box), "", box.title.count("\n")
    room = at.height - (BAR if box.share is not None else 0)
    y = at.y + (room - sum(row.size * LEADING for row in rows)) / 2
    for place, row in enumerate(rows):
        drawn += words(row, at.center[0], y + row.size, fill=palette.FAINT if place > breaks else palette.INK)
        y += row.size * LEADING
    if box.share is not None:
        inset = 22.0 if box.role == "move" else 10.0
        drawn += bar(at.x + inset, at.y + at.height - BAR - 3, at.width - 2 * inset, box.share, hue.ink)
    outline = f'rect {_rect(at)} rx="{number(min(round, at.height / 2))}"'
    if box.role == "move":
        outline = f'path class="frame" d="{pointed(at.x, at.y, at.width, at.height)}"'
    return call(box, hue, palette.fill_of(box, picture), outline, drawn)


def _line(line: Line, picture: Picture, route: Route) -> str:
    kind, path, ink = line.edge.kind, curve(route.points), palette.ink_of(line, picture)
    return edge(line, path, stroke(kind, path, ink) + head(route.points[-1], route.tip, kind, ink), reach=9)


def _label(line: Line, picture: Picture, layout: Layout) -> str:
    at, ink, rows = layout.routes[line.id].label, palette.ink_of(line, picture), line_words(line)
    assert at is not None, f"{line.id} has words, but Graphviz placed none"
    top, drawn, sign = at[1] - len(rows) * LABEL * LEADING / 2, "", ""
    for place, row in enumerate(rows):
        base = top + (place + 0.8) * LABEL * LEADING
        carried = line.edge.kind == "carried" and row.text in (NEXT_STEP, NEXT_STEPS)
        if carried:
            sign = turn(at[0] - row.width / 2 - 2, base - LABEL * 0.34, ink)
        drawn += words(row, at[0] + 6 * carried, base)
    return (
        f'<g class="label {text(line.edge.kind)}" data-id="{line.id}" pointer-events="none">'
        f'<g fill="{ink}" {_halo(_ground(at, picture, layout))}>{drawn}</g>{sign}</g>'
    )


def _legend(rows: list[str], layout: Layout) -> list[str]:
    if not rows:
        return []
    y = layout.height + 2 * _PAD + 6
    return [f'<g class="legend" transform="translate({number(_PAD)} {number(y)})">', *rows, "</g>"]


def _ground(at: Point, picture: Picture, layout: Layout) -> str:
    """The colour behind a point."""
    for group in picture.groups:
        rect = layout.groups[group.name]
        if rect.x <= at[0] <= rect.x + rect.width and rect.y <= at[1] <= rect.y + rect.height:
            return palette.hue_of_group(group).tint
    return palette.PAPER


def _halo(color: str) -> str:
    """Return the look of a rim around letters in the colour of the ground, so that no line strikes them through."""
    return f'stroke="{color}" stroke-width="3" stroke-linejoin="round" stroke-opacity="0.9" paint-order="stroke"'


def _rect(at: Rect) -> str:
    return f'x="{number(at.x)}" y="{number(at.y)}" width="{number(at.width)}" height="{number(at.height)}"'
