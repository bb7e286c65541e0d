"""The picture of a plan as one self-contained SVG: devices as cells, roles as stripes in the colours of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape

from ...graph.draw.layout.fonts import STACK, width
from ...graph.draw.palette import FAINT, FRAME, HUES, INK, NEUTRAL, PAPER
from .plan import Plan
from .rules import numbers
from .show import Row, Seat, pipeline, rows, seats

_PAD, _GAP = 16.0, 5.0
_CELL, _HEAD, _STRIPE = 62.0, 15.0, 17.0  # width of a cell, height of its number and of a stripe
_PER_LINE = 16
_NOTE, _TEXT, _BOLD = 10.5, 12.0, 13.0


def svg(plan: Plan, kinds: Mapping[str, str] | None = None) -> str:
    """Return the SVG of a plan; ``kinds`` as for :func:`flowrl.placement.plan.show.table`.

    A cell has a stripe for each role on its device, letter in front. A role that generates is hatched, so that the two
    copies of a worker are told apart. Nodes that look alike are drawn once.
    """
    taken = seats(plan, kinds or ())
    drawn = rows(plan, taken)
    most = max((len(c) for row in drawn for c in row.cells), default=1)
    high = _HEAD + max(most, 1) * _STRIPE + 4
    margin = max((_label_width(r) for r in drawn), default=0.0) + 18
    across = min(_PER_LINE, max((len(r.cells) for r in drawn if r.devices), default=3))
    title = f"{plan.cluster}, {plan.cluster.size} devices" if plan.cluster else "one process"
    parts: list[str] = []
    y = _PAD + 20
    for row in drawn:
        parts += _row(row, margin, y, high, across)
        y += -(-len(row.cells) // _PER_LINE) * (high + _GAP) + 8
    notes = [_legend_words(s) for s in taken]
    parts += _legend(taken, y + 10)
    y += 10 + len(taken) * 20
    wide = max(
        margin + across * (_CELL + _GAP),
        24 + max((width(n, _TEXT, "normal") for n in notes), default=0.0),
        width(title, _BOLD, "bold"),
        width(pipeline(plan), _NOTE, "normal"),
    )
    whole, tall = wide + 2 * _PAD, y + _PAD + 8
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Who sits where" '
                f'viewBox="0 0 {whole:.0f} {tall:.0f}" width="{whole:.0f}" height="{tall:.0f}" '
                f'font-family="{escape(STACK)}">',
                _hatch(),
                f'<rect x="0.5" y="0.5" width="{whole - 1:.0f}" height="{tall - 1:.0f}" rx="10" fill="{PAPER}" '
                f'stroke="{FRAME}"/>',
                _text(_PAD, _PAD + 6, title, _BOLD, INK, bold=True),
                *parts,
                _text(_PAD, y + 8, pipeline(plan), _NOTE, FAINT),
                "</svg>",
            ]
        )
        + "\n"
    )


def _hatch() -> str:
    return (
        '<defs><pattern id="generates" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2" height="7" fill="{PAPER}" opacity="0.55"/></pattern></defs>'
    )


def _label_width(row: Row) -> float:
    return max(width(w, size, "normal") for w, size in zip(_label(row), (_TEXT, _NOTE, _NOTE), strict=False))


def _label(row: Row) -> tuple[str, ...]:
    """What stands left of a row: nodes, kind, and the devices where they are not on the cells."""
    where = (f"devices {numbers(row.devices)}",) if row.alike > 1 else ()
    return (row.label, row.kind, *where)


def _row(row: Row, margin: float, y: float, high: float, across: int) -> Iterable[str]:
    for line, (words, size) in enumerate(zip(_label(row), (_TEXT, _NOTE, _NOTE), strict=False)):
        yield _text(_PAD, y + 13 + 14 * line, words, size, FAINT if line else INK)
    for i, cell in enumerate(row.cells):
        x = _PAD + margin + i % _PER_LINE * (_CELL + _GAP)
        top = y + i // _PER_LINE * (high + _GAP)
        if not row.devices:  # a pool without devices is one wide cell
            yield from _cell(cell, "", f"{row.label}: {row.kind}", x, top, across * (_CELL + _GAP) - _GAP, high)
        elif row.alike == 1:
            yield from _cell(cell, str(row.devices[i]), f"device {row.devices[i]}: {row.kind}", x, top, _CELL, high)
        else:
            tip = f"device {i} of each of {row.alike} nodes: {row.kind}"
            yield from _cell(cell, f"+{i}", tip, x, top, _CELL, high)


def _cell(cell: tuple[Seat, ...], number: str, tip: str, x: float, y: float, wide: float, high: float) -> Iterable[str]:
    roles = "".join(f"\n{s.letter} {_legend_words(s)}" for s in cell) or "\nnobody"
    yield f'<g class="device"><title>{escape(tip + roles)}</title>'
    dashed = "" if cell else ' stroke-dasharray="4 3"'
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="4" fill="{NEUTRAL.tint}" '
        f'stroke="{NEUTRAL.edge}"{dashed}/>'
    )
    if number:
        yield _text(x + 5, y + 11.5, number, _NOTE, FAINT)
    top = y + (_HEAD if number else 2)
    stripe = (y + high - 2 - top) / max(len(cell), 1)
    for n, seat in enumerate(cell):
        yield from _swatch(seat, x + 2, top + n * stripe, wide - 4, stripe - 1.5)
    yield "</g>"


def _swatch(seat: Seat, x: float, y: float, wide: float, high: float) -> Iterable[str]:
    hue = HUES[seat.hue % len(HUES)]
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="2"'
    yield f'<rect {box} fill="{hue.edge}"/>'
    if seat.use == "generate":
        yield f'<rect {box} fill="url(#generates)"/>'
    words = next((w for w in (seat.title, seat.worker) if width(f"{seat.letter}  {w}", _NOTE, "bold") < wide - 9), "")
    yield _text(x + 5, y + high / 2 + 3.8, f"{seat.letter}  {words}".rstrip(), _NOTE, INK, bold=True)


def _legend_words(seat: Seat) -> str:
    mesh = " ".join(f"{a}={n}" for a, n in seat.place.mesh.said.items())
    backend = "" if seat.pool.processes else seat.place.backend
    return " · ".join(w for w in (seat.title, f"pool {seat.pool.name}", mesh, backend) if w)


def _legend(taken: Iterable[Seat], y: float) -> Iterable[str]:
    for n, seat in enumerate(taken):
        yield from _swatch(seat, _PAD, y + n * 20, 18 + 6 * (len(seat.letter) - 1), 14)
        yield _text(_PAD + 26 + 6 * (len(seat.letter) - 1), y + n * 20 + 11, _legend_words(seat), _TEXT, INK)


def _text(x: float, y: float, words: str, size: float, ink: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{ink}"{weight}>{escape(words)}</text>'
