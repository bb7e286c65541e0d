"""What is written in a box, at a line and over a group, and the room it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..picture import Box, Line, Picture
from .fonts import width

TITLE, NOTE, LABEL, HEAD = 14.0, 11.5, 11.5, 13.5  # font sizes in points
BAR = 7.0  # room for the bar of a call's time, or of a pool's
LEADING = 1.25  # line height in font sizes
METER = 54.0  # length of the bar in the title of a pool
_MARGINS = {"library": (9.0, 4.5), "none": (9.0, 4.5), "move": (22.0, 6.0)}

Size = tuple[float, float]


@dataclass(frozen=True)
class Words:
    """One line of text: ``Words("generate", 12.5, bold=True)``."""

    text: str
    size: float
    bold: bool = False
    italic: bool = False

    @property
    def width(self) -> float:
        return width(self.text, self.size, "bold" if self.bold else "normal")


def box_words(box: Box) -> tuple[Words, ...]:
    """The lines of text in a box: its name, what is special about it, under which condition it happens."""
    small = box.role in ("library", "none")
    rows = [Words(row, NOTE + 1 if small else TITLE, bold=not small) for row in box.title.split("\n")]
    rows += [Words(row, NOTE, bold=row == box.time) for row in box.rows]
    return (*rows, *(Words(row, NOTE, italic=True) for row in box.conditions))


def line_words(line: Line) -> tuple[Words, ...]:
    """The lines of text at a line."""
    slanted = line.edge.kind in ("weights", "serves")
    rows = [Words(text, LABEL, italic=slanted) for text in line.label]
    return (*rows, *(Words(row, LABEL, italic=True) for row in line.conditions))


def sizes(picture: Picture) -> Mapping[str, Size]:
    """Room in points for every box, label and title of a group, by id."""
    rooms = {box.id: _box(box) for box in picture.boxes}
    rooms |= {line.id: _label(line) for line in picture.lines if line_words(line)}
    for group in picture.groups:
        wide = width(group.name, HEAD, "bold") + 6 + width(group.kind, NOTE)
        wide += METER + 8 if group.busy is not None else 0
        rooms[f"title of {group.name}"] = (wide + 6, HEAD * 1.4)
    return rooms


def _box(box: Box) -> Size:
    rows = box_words(box)
    across, down = _MARGINS.get(box.role, (13.0, 7.0))
    wide, high = max(row.width for row in rows), sum(row.size * LEADING for row in rows)
    return max(wide + 2 * across, 34.0), high + 2 * down + (BAR if box.share is not None else 0)


def _label(line: Line) -> Size:
    rows = line_words(line)
    sign = 12 if line.edge.kind == "carried" else 0
    return max(row.width for row in rows) + 8 + sign, len(rows) * LABEL * LEADING + 2
