"""The parts of which the SVG is drawn: words held to their width, paths, arrow heads, looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from . import palette
from .layout.box_sizes import Words
from .layout.fonts import STACK
from .layout.graphviz_positions import Point
from .picture import Box, Line, Picture

DASHES = {"weights": "6 4", "order": "0.1 4", "control": "2 3"}
WIDTHS = {"data": 1.2, "weights": 1.5, "carried": 1.6, "order": 1.5, "control": 1.3, "serves": 4.0}


def opening(picture: Picture, wide: float, high: float, *, style: str = "flowrl") -> list[str]:
    """The start of a drawing: its size, what it shows in words, and the paper below it."""
    summary, across, down = text(picture.summary), number(wide), number(high)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{style}" role="img" aria-label="{summary}" '
        f'viewBox="0 0 {across} {down}" width="{across}" height="{down}" font-family="{text(STACK)}">',
        f"<title>{text(picture.program)}</title>\n<desc>{summary}</desc>\n{palette.STYLE}",
        f'<rect class="paper" x="0.5" y="0.5" width="{number(wide - 1)}" height="{number(high - 1)}" rx="10" '
        f'fill="{palette.PAPER}" stroke="{palette.FRAME}"/>',
    ]


def call(box: Box, hue: palette.Hue, fill: str, outline: str, written: str) -> str:
    """A box: ``outline`` is its shape as an element that is not closed yet, ``written`` what stands in it."""
    update = box.role == "update"
    look = f'fill="{fill}" stroke="{hue.ink if update else hue.edge}" stroke-width="{2 if update else 1.2}"'
    look += ' stroke-dasharray="4 3"' if box.condition or box.role in ("worker", "none") else ""
    return (
        f'<g class="node {box.role}" data-id="{text(box.id)}" data-group="{text(box.group or "")}">'
        f"<title>{text(box.tip)}</title><{outline} {look}/>{written}</g>"
    )


def edge(line: Line, path: str, drawn: str, *, reach: int) -> str:
    """A line twice: as it is ``drawn``, and clear and as wide as ``reach``, so that a pointer finds it."""
    return (
        f'<g class="edge {text(line.edge.kind)}" data-id="{line.id}" data-src="{text(line.edge.src)}" '
        f'data-dst="{text(line.edge.dst)}"><title>{text(line.tip)}</title>'
        f'<path class="reach" d="{path}" fill="none" stroke="#000" stroke-opacity="0" stroke-width="{reach}"/>'
        f"{drawn}</g>"
    )


def words(row: Words, x: float, base: float, *, anchor: str = "middle", fill: str | None = None) -> str:
    """One line of text on the baseline ``base``, pressed into its measured width whatever font is there."""
    look = f' font-size="{number(row.size)}"'
    look += ' font-weight="bold"' if row.bold else ""
    look += ' font-style="italic"' if row.italic else ""
    look += f' text-anchor="{anchor}"' if anchor != "start" else ""
    look += f' fill="{fill}"' if fill else ""
    fit = f' textLength="{number(row.width)}" lengthAdjust="spacingAndGlyphs"' if row.width else ""
    return f'<text x="{number(x)}" y="{number(base)}"{look}{fit}>{text(row.text)}</text>'


def stroke(kind: str, path: str, ink: str) -> str:
    """A line in the look of its kind; a serves line is double."""
    look = f'stroke="{ink}" stroke-width="{WIDTHS.get(kind, 1.2)}"'
    if kind in DASHES:
        look += f' stroke-dasharray="{DASHES[kind]}"' + (' stroke-linecap="round"' if kind == "order" else "")
    drawn = f'<path class="stroke" d="{path}" fill="none" {look}/>'
    if kind == "serves":
        drawn += f'<path d="{path}" fill="none" stroke="{palette.PAPER}" stroke-width="1.6"/>'
    return drawn


def head(end: Point, tip: Point, kind: str, ink: str) -> str:
    """The arrow head. A shape of its own: markers need ids, which clash where two pictures share a page."""
    long = math.dist(end, tip) or 1.0
    ux, uy = (tip[0] - end[0]) / long, (tip[1] - end[1]) / long

    def at(back: float, aside: float) -> Point:
        return tip[0] - back * ux - aside * uy, tip[1] - back * uy + aside * ux

    if kind == "serves":
        diamond = polygon([tip, at(5, 3.6), at(10, 0), at(5, -3.6)])
        return f'<path class="head" d="{diamond}" fill="{palette.PAPER}" stroke="{ink}" stroke-width="1.2"/>'
    return f'<path class="head" d="{polygon([tip, at(8, 3), at(8, -3)])}" fill="{ink}"/>'


def turn(x: float, y: float, ink: str) -> str:
    """A small arrow that goes round: carried into the next step. Drawn, as few fonts have the sign."""
    r = 3.4
    left, right, top = number(x - r / 2), number(x + r / 2), number(y - 0.866 * r)
    arc = f"M{left} {top}A{r} {r} 0 1 0 {right} {top}"
    tip = polygon([(x - 0.4, y - r - 1.6), (x + 3.6, y - r + 0.2), (x + 0.6, y - r + 2.8)])
    return f'<path d="{arc}" fill="none" stroke="{ink}" stroke-width="1.2"/><path d="{tip}" fill="{ink}"/>'


def pointed(x: float, y: float, width: float, height: float, cut: float = 11.0) -> str:
    """The path of a box with pointed ends: weights on their way."""
    right, low, middle = x + width, y + height, y + height / 2
    return polygon([(x, middle), (x + cut, y), (right - cut, y), (right, middle), (right - cut, low), (x + cut, low)])


def bar(x: float, y: float, width: float, part: float, ink: str) -> str:
    """A bar that is filled to a part (0 to 1)."""
    whole = f'<rect class="bar" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="3" rx="1.5"'
    filled = f'<rect class="bar" x="{number(x)}" y="{number(y)}" width="{number(width * min(1, max(0, part)))}"'
    return f'{whole} fill="{ink}" fill-opacity="0.18"/>{filled} height="3" rx="1.5" fill="{ink}"/>'


def curve(points: Sequence[Point]) -> str:
    """The path of a chain of Bezier curves."""
    start, *rest = [f"{number(x)} {number(y)}" for x, y in points]
    return f"M{start}C{' '.join(rest)}"


def polygon(corners: Iterable[Point]) -> str:
    """The path of a closed polygon."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in corners) + "Z"


def number(value: float) -> str:
    """Return a number as SVG has it; a tenth of a point is enough."""
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def text(value: str) -> str:
    """Escaped for XML, without the characters that XML has no way to write."""
    return escape("".join(c for c in value if _writable(c)), quote=True)


def _writable(char: str) -> bool:
    return char in "\t\n" or (char >= " " and not "\ud800" <= char <= "\udfff" and char not in "\ufffe\uffff")
