"""The graph as one column of calls in program order, for narrow screens and for graphs too wide for any other.

Each box says what it reads and from where. Lines run beside the boxes, one for all that comes from a call: left of
them down to what reads it, right of them up to the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...record import Graph
from .. import legend, palette
from ..picture import Box, Line, Picture, draw
from ..strokes import bar, call, edge, head, number, opening, pointed, stroke, turn, words
from .box_sizes import BAR, LEADING, NOTE, TITLE, Words
from .fonts import width

WIDTH = 340.0  # points: what a phone of 390 has room for
_LANE, _PAD, _GAP, _PORT = 7.0, 9.0, 13.0, 10.0
_LEAST = 190.0  # width of a box


@dataclass(frozen=True)
class Track:
    """All lines of a kind that come from one call: ``Track("actor.update", "weights", lines, up=True, lane=0)``."""

    src: str
    kind: str
    lines: tuple[Line, ...]
    up: bool
    lane: int = 0


def column(graph: Graph) -> Picture:
    """Return the picture of a column: calls by their full names, in the colours of their workers, without fields."""
    picture = draw(graph)
    boxes = tuple(_alone(box, picture) for box in picture.boxes)
    hues = {worker.name: (worker.name, worker.kind, hue) for hue, worker in enumerate(graph.workers)}
    used = {box.hue for box in boxes}
    shown = tuple(worker for worker in hues.values() if worker[2] in used)
    return replace(picture, boxes=boxes, workers=shown)


def column_svg(picture: Picture, *, with_legend: bool = True, wide: float = WIDTH) -> str:
    """The SVG of a column."""
    tracks = _tracks(picture)
    left = _PAD + _LANE * (1 + max((t.lane + 1 for t in tracks if not t.up), default=0))
    right = _PAD + _LANE * (1 + max((t.lane + 1 for t in tracks if t.up), default=0))
    wide = max(wide, left + _LEAST + right)
    room = wide - left - right
    heading = _heading(picture, wide)
    tops: dict[str, float] = {}
    heights: dict[str, float] = {}
    y = _PAD + len(heading) * NOTE * 1.5
    rows = {box.id: _rows(box, picture, room) for box in picture.boxes}
    for box in picture.boxes:
        ports = _ports(box.id, tracks)
        least = 10 + _PORT * max(len(ports[False]), len(ports[True]))
        tops[box.id] = y
        heights[box.id] = max(least, _height(box, rows[box.id]))
        y += heights[box.id] + _GAP
    samples = legend.rows(picture, wide - 2 * _PAD) if with_legend else []
    high = y + (len(samples) * legend.ROW + 6 if samples else 0)
    drawn = [
        *opening(picture, wide, high, style="flowrl column"),
        *heading,
        *(_track(track, picture, tops, heights, tracks, left, wide - right) for track in tracks),
        *(_box(box, picture, rows[box.id], left, tops[box.id], room, heights[box.id]) for box in picture.boxes),
    ]
    if samples:
        drawn += [f'<g class="legend" transform="translate({number(_PAD)} {number(y + 8)})">', *samples, "</g>"]
    return "\n".join([*drawn, "</svg>"]) + "\n"


# -- what stands in it ----------------------------------------------------------------------------------------------


def _alone(box: Box, picture: Picture) -> Box:
    """A box that says its worker and its pool, as no field around it does."""
    group, box = picture.group(box.group), replace(box, title=" ".join(box.title.split("\n")))
    if group is None:
        return box
    if group.pool:
        return replace(box, place=(f"in {group.name}", *box.place))
    title = box.title if box.title.startswith(f"{group.name}.") else f"{group.name}.{box.title}"
    return replace(box, title=title, hue=group.hue)


def _heading(picture: Picture, wide: float) -> list[str]:
    """A line for each pool, with what it has and how busy it is."""
    drawn: list[str] = []
    for place, group in enumerate(group for group in picture.groups if group.pool):
        row = _fitted(f"{group.name}: {group.kind}", wide - 2 * _PAD, NOTE)[0]
        base = _PAD + NOTE + place * NOTE * 1.5
        drawn.append(words(Words(row, NOTE), _PAD, base, anchor="start", fill=palette.POOL.ink))
    return drawn


def _rows(box: Box, picture: Picture, room: float) -> list[tuple[Words, str]]:
    """The lines of text of a box, each with its colour: name, marks, condition, and what comes from where."""
    inner = room - 2 * 8.0
    rows = [(Words(row, TITLE, bold=True), palette.INK) for row in _fitted(box.title, inner, TITLE, bold=True)]
    for note in box.rows:
        bold = note == box.time
        rows += [(Words(row, NOTE, bold=bold), palette.FAINT) for row in _fitted(note, inner, NOTE, bold=bold)]
    for row in box.conditions:
        rows += [(Words(part, NOTE, italic=True), palette.FAINT) for part in _fitted(row, inner, NOTE)]
    for line in picture.lines:
        if line.edge.dst == box.id and line.edge.kind != "control":
            rows += [(Words(row, NOTE), palette.ink_of(line, picture)) for row in _fitted(_from(line), inner, NOTE)]
    return rows


def _from(line: Line) -> str:
    """Return what a line brings, in words: ``← actor.generate: tokens, response_mask``."""
    edge = line.edge
    names = ", ".join(word for word in line.label if word)
    before = {"weights": "weights of ", "serves": "served by ", "order": "after "}.get(edge.kind, "")
    return (
        f"← {before}{edge.src}"
        + (f": {names}" if names and edge.kind != "serves" else "")
        + (f" if {line.condition}" if line.condition else "")
    )


def _fitted(row: str, room: float, size: float, *, bold: bool = False) -> list[str]:
    """A text on as many lines as it takes, broken at blanks, or within a word that is too long for one."""
    style = "bold" if bold else "normal"
    rows: list[str] = [""]
    for word in row.split():
        longer = f"{rows[-1]} {word}".strip()
        if width(longer, size, style) <= room or not rows[-1]:
            rows[-1] = longer
        else:
            rows.append(word)
        while width(rows[-1], size, style) > room and len(rows[-1]) > 1:
            cut = next(n for n in range(len(rows[-1]), 0, -1) if width(rows[-1][:n], size, style) <= room or n == 1)
            rows[-1:] = [rows[-1][:cut], rows[-1][cut:]]
    return rows


def _height(box: Box, rows: Sequence[tuple[Words, str]]) -> float:
    return sum(row.size * LEADING for row, _ in rows) + 14 + (BAR if box.share is not None else 0)


# -- lines ----------------------------------------------------------------------------------------------------------


def _tracks(picture: Picture) -> list[Track]:
    """The lines by call and kind, each track in the nearest lane that is free beside it."""
    place = {box.id: number for number, box in enumerate(picture.boxes)}
    bundles: dict[tuple[str, str, bool], list[Line]] = {}
    for line in picture.lines:
        src = _start(line, picture)
        if src in place and line.edge.dst in place:
            up = place[src] >= place[line.edge.dst]
            bundles.setdefault((src, line.edge.kind, up), []).append(line)
    tracks = [Track(src, kind, tuple(lines), up) for (src, kind, up), lines in bundles.items()]
    tracks.sort(key=lambda track: _span(track, place)[1] - _span(track, place)[0])
    taken: dict[bool, list[list[tuple[int, int]]]] = {False: [], True: []}
    placed: list[Track] = []
    for track in tracks:
        first, last = _span(track, place)
        lanes = taken[track.up]
        lane = next((n for n, spans in enumerate(lanes) if all(last < a or b < first for a, b in spans)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((first, last))
        placed.append(replace(track, lane=lane))
    return sorted(placed, key=lambda track: (place[track.src], track.kind))


def _start(line: Line, picture: Picture) -> str:
    """The box that a line comes from; of a worker that serves, its last."""
    group = picture.group(line.edge.src)
    return group.boxes[-1] if group is not None and not group.pool else line.edge.src


def _span(track: Track, place: Mapping[str, int]) -> tuple[int, int]:
    ends = [place[track.src], *(place[line.edge.dst] for line in track.lines)]
    return min(ends), max(ends)


def _ports(id: str, tracks: Sequence[Track]) -> dict[bool, list[tuple[Track, bool]]]:
    """Return what comes in at a box and goes out of it, by side: tracks that come in first."""
    ports: dict[bool, list[tuple[Track, bool]]] = {False: [], True: []}
    for enters in (True, False):
        for track in tracks:
            if any(line.edge.dst == id for line in track.lines) if enters else track.src == id:
                ports[track.up].append((track, enters))
    return ports


def _at(track: Track, id: str, enters: bool, tracks: Sequence[Track], top: float, height: float) -> float:
    """The height of a port of a box."""
    ports = _ports(id, tracks)[track.up]
    return top + height * (ports.index((track, enters)) + 1) / (len(ports) + 1)


def _track(
    track: Track,
    picture: Picture,
    tops: Mapping[str, float],
    heights: Mapping[str, float],
    tracks: Sequence[Track],
    left: float,
    right: float,
) -> str:
    """A track: a line for each of what it leads to, on top of each other where they run in the lane."""
    x = right + _LANE * (track.lane + 1) if track.up else left - _LANE * (track.lane + 1)
    side = right if track.up else left
    inward = 6.0 if track.up else -6.0
    start = _at(track, track.src, False, tracks, tops[track.src], heights[track.src])
    drawn: list[str] = []
    for line in track.lines:
        dst = line.edge.dst
        end = _at(track, dst, True, tracks, tops[dst], heights[dst])
        ink, kind = palette.ink_of(line, picture), line.edge.kind
        path = f"M{number(side)} {number(start)}H{number(x)}V{number(end)}H{number(side + inward)}"
        sign = turn(x, (start + end) / 2, ink) if kind == "carried" else ""
        shown = stroke(kind, path, ink) + head((side + inward, end), (side, end), kind, ink) + sign
        drawn.append(edge(line, path, shown, reach=7))
    return "\n".join(drawn)


def _box(
    box: Box, picture: Picture, rows: Sequence[tuple[Words, str]], x: float, top: float, room: float, height: float
) -> str:
    hue = palette.hue_of(box, picture)
    outline = f'rect x="{number(x)}" y="{number(top)}" width="{number(room)}" height="{number(height)}" rx="6"'
    if box.role == "move":
        outline = f'path class="frame" d="{pointed(x, top, room, height, cut=7)}"'
    y, drawn = top + 7, ""
    for row, ink in rows:
        drawn += words(row, x + 9, y + row.size, anchor="start", fill=ink)
        y += row.size * LEADING
    if box.share is not None:
        drawn += bar(x + 9, top + height - BAR - 1, room - 18, box.share, hue.ink)
    return call(box, hue, palette.PAPER if box.role in ("worker", "none") else hue.tint, outline, drawn)
