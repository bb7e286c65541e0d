"""What the lines and boxes of a picture mean: a sample and a few words for each kind that occurs in it."""

from __future__ import annotations

from . import palette
from .layout.box_sizes import NOTE, Words
from .picture import Picture
from .strokes import bar, head, number, pointed, stroke, words

ROW, SAMPLE, GAP = 18.0, 34.0, 18.0
_HUE = "worker "  # and the number of its colour
_WRITTEN = {"bytes": "1 GB", "version": "v(k)"}

_MEANING = {
    "data": "data: the fields that are read",
    "weights": "weights, and how old they may be",
    "carried": "carried into the next step",
    "order": "order only",
    "control": "decides whether, or with what",
    "serves": "serves its engine",
    "condition": "only under that condition",
    "move": "weights on their way to where they are read",
    "bytes": "bytes in a step, and how they leave a pool",
    "version": "with the updates of all steps before step k",
    "share": "time of a call, and its part of its pool's",
}


def entries(picture: Picture) -> tuple[tuple[str, str], ...]:
    """Kind and meaning of all that occurs."""
    there = {
        "condition": any(box.condition for box in picture.boxes),
        "move": any(box.role == "move" for box in picture.boxes),
        "bytes": any(line.edge.bytes for line in picture.lines),
        "version": any("v(k" in (line.edge.version or "") for line in picture.lines),
        "share": any(box.share is not None for box in picture.boxes),
    }
    kinds = [*picture.kinds(), *(kind for kind, found in there.items() if found)]
    workers = [(f"{_HUE}{hue}", f"{name}: {kind}") for name, kind, hue in picture.workers]
    return (*workers, *((kind, _MEANING[kind]) for kind in kinds))


def sample(kind: str, x: float, y: float) -> str:
    """A short line (or box) of that kind, 27 points long, on the height ``y``."""
    if kind == "condition" or kind.startswith(_HUE):
        return _swatch(kind, x, y)
    if kind == "move":
        shape = pointed(x, y - 6, 27, 12, cut=6)
        return f'<path d="{shape}" fill="{palette.PAPER}" stroke="{palette.FAINT}" stroke-width="1.2"/>'
    if kind == "share":
        return bar(x, y - 1.5, 27, 0.6, palette.FAINT)
    if kind in _WRITTEN:
        written = Words(_WRITTEN[kind], NOTE, italic=kind == "version")
        return words(written, x, y + 3.3, anchor="start", fill=palette.FAINT)
    ink = palette.CARRIED if kind == "carried" else palette.FAINT
    drawn = stroke(kind, f"M{number(x)} {number(y)}H{number(x + 19)}", ink)
    return drawn + head((x + 19, y), (x + 27, y), kind, ink)


def _swatch(kind: str, x: float, y: float) -> str:
    """A small box: in the colours of a worker, or broken for what happens under a condition."""
    if kind == "condition":
        look = f'fill="{palette.PAPER}" stroke="{palette.FAINT}" stroke-width="1.2" stroke-dasharray="4 3"'
    else:
        hue = palette.HUES[int(kind.removeprefix(_HUE)) % len(palette.HUES)]
        look = f'fill="{hue.tint}" stroke="{hue.edge}" stroke-width="1.2"'
    return f'<rect x="{number(x)}" y="{number(y - 6)}" width="27" height="12" rx="3" {look}/>'


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
