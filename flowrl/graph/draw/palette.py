"""The colours of the drawings: a hue per worker, grey for library calls and pools, one of its own for carried edges."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .picture import Box, Group, Line, Picture


@dataclass(frozen=True)
class Hue:
    """``tint`` fills a group, ``edge`` outlines it, ``ink`` writes in it and has contrast for that."""

    tint: str
    edge: str
    ink: str


HUES = (
    Hue("#eaf2fb", "#7fb0e0", "#1b5a9c"),  # blue
    Hue("#fdf1e1", "#e3ab62", "#8f5000"),  # orange
    Hue("#e7f5ec", "#7cc39b", "#17693f"),  # green
    Hue("#f2ecfb", "#b39adb", "#5b3a94"),  # violet
    Hue("#e3f4f5", "#6fbcc2", "#0b6068"),  # teal
    Hue("#fbeceb", "#e09a93", "#9c2f26"),  # red
    Hue("#f3f3dd", "#b9b866", "#5d5c0d"),  # olive
    Hue("#f4ece6", "#c3a289", "#6b4426"),  # brown
)
POOL = Hue("#f8f9fb", "#9aa5b1", "#39424d")
NEUTRAL = Hue("#f3f5f7", "#b3bcc6", "#4b5561")
CARRIED = "#b4239a"
INK = "#1f2328"
FAINT = "#5f6770"
PAPER = "#ffffff"
FRAME = "#d0d7de"

#: What stands for these colours on a dark screen.
_NIGHT = (
    Hue("#14263a", "#3f6d9e", "#9cc7f5"),
    Hue("#33240f", "#8f6427", "#f0bd7a"),
    Hue("#12291c", "#3c7d58", "#8fd6ad"),
    Hue("#251b38", "#6f579b", "#c9b3ee"),
    Hue("#0f2a2d", "#35777d", "#86d3d9"),
    Hue("#351b19", "#99544d", "#f0aaa3"),
    Hue("#2a2a10", "#75742f", "#d5d488"),
    Hue("#2b2019", "#7d6048", "#dcbfa6"),
    Hue("#1a2027", "#5c6874", "#c3ccd6"),
    Hue("#20262d", "#56606b", "#b6c0cb"),
)


def _dark() -> dict[str, str]:
    """Every colour of a drawing with the one that stands for it on a dark screen."""
    pairs = zip((*HUES, POOL, NEUTRAL), _NIGHT, strict=True)
    colours = {a: b for day, night in pairs for a, b in zip(astuple(day), astuple(night), strict=True)}
    return colours | {CARRIED: "#ee82dc", INK: "#e6edf3", FAINT: "#a5afba", PAPER: "#1c2128", FRAME: "#3a424c"}


def _style() -> str:
    """A style that darkens a drawing where the screen is dark, also inside an ``<img>``; paper stays light."""
    rules = [f'.flowrl [{part}="{a}"]{{{part}:{b}}}' for a, b in _dark().items() for part in ("fill", "stroke")]
    return f"<style>@media screen and (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


#: The style of every drawing.
STYLE = _style()


def hue_of_group(group: Group) -> Hue:
    """The colours of a worker, which start again after eight, or of a pool."""
    return POOL if group.pool else HUES[group.hue % len(HUES)]


def hue_of(box: Box, picture: Picture) -> Hue:
    """The colours of a box: those of its worker, grey for the rest."""
    if box.hue is not None:
        return HUES[box.hue % len(HUES)]
    group = picture.group(box.group)
    return hue_of_group(group) if group and not group.pool else NEUTRAL


def fill_of(box: Box, picture: Picture) -> str:
    """The ground of a box: white in the field of its worker, else the tint of its colour."""
    group = picture.group(box.group)
    return PAPER if group and not group.pool else hue_of(box, picture).tint


def ink_of(line: Line, picture: Picture) -> str:
    """The colour of a line: that of the worker it comes from, so that an eye can follow it."""
    if line.edge.kind == "carried":
        return CARRIED
    if line.edge.kind in ("order", "control"):
        return FAINT
    group = picture.group(line.edge.src)
    return hue_of_group(group).ink if group else hue_of(picture.box(line.edge.src), picture).ink
