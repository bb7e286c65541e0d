"""The graph as Graphviz source, for ``dot -Tpdf``: a cluster per worker, edges styled by what they carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..record import Graph
from . import palette
from .layout.box_sizes import Size
from .picture import Box, Group, Line, Picture, draw

_FONT = 'fontname="Helvetica,Arial,sans-serif"'
_STYLE = {
    "weights": "style=dashed penwidth=1.4",
    "order": "style=dotted arrowhead=vee",
    "control": "style=dashed arrowhead=empty",
    "carried": "penwidth=1.4",
    "serves": "penwidth=1.6 arrowhead=odiamond",
}


def render(graph: Graph) -> str:
    """Graphviz source of the graph."""
    return source(draw(graph))


def source(picture: Picture, sizes: Mapping[str, Size] | None = None, weights: int = 1) -> str:
    """Graphviz source of a picture. ``weights`` says how much weights edges are to be straight and short.

    With ``sizes`` (in points, by id of box, line or title) nothing is left to Graphviz's fonts: boxes get
    these sizes, labels keep this much room, and there is no text of the user's in it. This is how the SVG
    is laid out.
    """
    return "\n".join(_rows(picture, sizes, weights)) + "\n"


def quoted(text: str) -> str:
    """A Graphviz string. Backslashes are doubled, so that none of its escapes is left."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ")
    return '"' + escaped.replace("\n", "\\n").replace("\0", "") + '"'


def names(picture: Picture, *, plain: bool) -> dict[str, str]:
    """Return what boxes and groups are called in the source: as they are, or by number."""
    if not plain:
        boxes = {box.id: box.id for box in picture.boxes}
        return boxes | {group.name: f"cluster_{group.name}" for group in picture.groups}
    numbers = {box.id: f"n{number}" for number, box in enumerate(picture.boxes)}
    return numbers | {group.name: f"cluster_{group.hue}" for group in picture.groups}


def _rows(picture: Picture, sizes: Mapping[str, Size] | None, weights: int) -> Iterator[str]:
    called = {id: quoted(name) for id, name in names(picture, plain=sizes is not None).items()}
    boxes = {box.id: f"{called[box.id]} [{_box(box, picture, sizes)}]" for box in picture.boxes}
    yield f"digraph {quoted(picture.program if sizes is None else '')} {{"
    yield f"  graph [compound=true newrank=true nodesep=0.12 ranksep=0.42 {_FONT} fontsize=12 labeljust=l]"
    yield f'  node [shape=box style="rounded,filled" {_FONT} fontsize=11 margin="0.14,0.07"]'
    yield f"  edge [{_FONT} fontsize=9 arrowsize=0.7]"
    yield from (f"  {boxes[box.id]}" for box in picture.boxes if box.group is None)
    for group in picture.groups:
        yield f"  subgraph {called[group.name]} {{"
        yield f"    graph [{_group(group, sizes)}]"
        yield from (f"    {boxes[id]}" for id in group.boxes)
        yield "  }"
    for line in picture.lines:
        pull = weights if line.edge.kind == "weights" else 1
        yield f"  {_line(line, picture, called, sizes, pull)}"
    yield "}"


def _group(group: Group, sizes: Mapping[str, Size] | None) -> str:
    hue = palette.hue_of_group(group)
    label = _label((": ".join(filter(None, (group.name, group.kind))),), f"title of {group.name}", sizes)
    look = f'style="rounded,filled" fillcolor="{hue.tint}" color="{hue.edge}" fontcolor="{hue.ink}" margin=12'
    return f"{label} {look}" + ("" if sizes else f" tooltip={quoted(group.tip)}")


def _box(box: Box, picture: Picture, sizes: Mapping[str, Size] | None) -> str:
    if sizes:
        width, height = sizes[box.id]
        return f'label="" fixedsize=true width={width / 72:.4f} height={height / 72:.4f}'
    hue = palette.hue_of(box, picture)
    look = f'fillcolor="{palette.fill_of(box, picture)}" color="{hue.edge}" fontcolor="{hue.ink}"'
    look += " penwidth=2" if box.role == "update" else ""
    look += " shape=hexagon style=filled" if box.role == "move" else ""
    look += ' style="rounded,filled,dashed"' if box.condition else ""
    return f"{_label((box.title, *box.rows, *box.conditions), box.id, None)} {look} tooltip={quoted(box.tip)}"


def _line(line: Line, picture: Picture, called: Mapping[str, str], sizes: Mapping[str, Size] | None, pull: int) -> str:
    """A line against program order is written backwards with ``dir=back``: ranks follow the program."""
    edge, ink, look = line.edge, palette.ink_of(line, picture), _STYLE.get(line.edge.kind, "")
    ends, words = [called[edge.src], called[edge.dst]], [f"id={line.id}"]
    group = picture.group(edge.src) if edge.kind == "serves" else None
    if group:
        ends[0] = called[group.boxes[-1]]
        words.append(f"{'lhead' if line.back else 'ltail'}={called[group.name]}")
    if line.back and edge.src != edge.dst:
        ends.reverse()
        words.append("dir=back")
        look = look.replace("arrowhead", "arrowtail")
    text = (*line.label, *line.conditions)
    words += [_label(text, line.id, sizes)] if text else []
    words.append(f'color="{ink}:{ink}"' if edge.kind == "serves" else f'color="{ink}"')
    words += [] if sizes else [f'fontcolor="{ink}"', f"tooltip={quoted(line.tip)}"]
    words += [f"weight={pull}"] if pull != 1 else []
    words += [look] if look else []
    return f"{' -> '.join(ends)} [{' '.join(words)}]"


def _label(rows: Sequence[str], id: str, sizes: Mapping[str, Size] | None) -> str:
    if sizes is None:
        return f"label={quoted(chr(10).join(rows))}"
    width, height = sizes[id]
    return (
        f'label=<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>'
        f'<TD FIXEDSIZE="TRUE" WIDTH="{width:.0f}" HEIGHT="{height:.0f}"></TD></TR></TABLE>>'
    )
