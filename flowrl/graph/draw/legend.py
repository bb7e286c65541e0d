"""What the lines and boxes of a picture mean: a sample and a few words for each kind that occurs in it."""

from __future__ import annotations

from . import palette
from .measure import NOTE, Words
from .picture import Picture
from .strokes import head, number, stroke, words

ROW, SAMPLE, GAP = 18.0, 34.0, 18.0

_MEANING = {
    "data": "data: the fields that are read",
    "weights": "weights, and how old they may be",
    "carried": "carried into the next step",
    "order": "order only",
    "serves": "serves its engine",
    "condition": "only under that condition",
}


def entries(picture: Picture) -> tuple[tuple[str, str], ...]:
    """Kind and meaning of all that occurs."""
    kinds = [*picture.kinds(), *(["condition"] if any(box.condition for box in picture.boxes) else [])]
    return tuple((kind, _MEANING[kind]) for kind in kinds)


def sample(kind: str, x: float, y: float) -> str:
    """A short line (or box) of that kind, 27 points long, on the height ``y``."""
    if kind == "condition":
        return (
            f'<rect x="{number(x)}" y="{number(y - 6)}" width="27" height="12" rx="3" fill="{palette.PAPER}" '
            f'stroke="{palette.FAINT}" stroke-width="1.2" stroke-dasharray="4 3"/>'
        )
    ink = palette.CARRIED if kind == "carried" else palette.FAINT
    drawn = stroke(kind, f"M{number(x)} {number(y)}H{number(x + 19)}", ink)
    return drawn + head((x + 19, y), (x + 27, y), kind, ink)


def rows(picture: Picture, room: float) -> list[str]:
    """The legend as SVG, a string per row of at most ``room`` points, each drawn at its own height."""
    lines: list[str] = []
    x = 0.0
    for kind, meaning in entries(picture):
        row = Words(meaning, NOTE)
        if not lines or x + SAMPLE + row.width > room:
            lines.append("")
            x = 0.0
        y = (len(lines) - 1) * ROW
        lines[-1] += sample(kind, x, y) + words(row, x + SAMPLE, y + 3.3, anchor="start", fill=palette.FAINT)
        x += SAMPLE + row.width + GAP
    return lines
