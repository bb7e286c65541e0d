"""The graph as one page to explore: picture, pan, zoom, cards, a table of all calls. Nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from string import Template

from ...errors import shown
from ..record import Graph, Node
from . import legend
from .picture import Picture, draw, place_of
from .strokes import text
from .svg import picture_svg


def render(graph: Graph) -> str:
    """The page of the graph. Raises FlowError where pygraphviz is missing."""
    picture = draw(graph)
    home = next((shown(node.file) for node in graph.nodes if node.file), "")
    return Template(_file("page.html")).substitute(
        program=text(graph.program),
        home=text(home),
        summary=text(picture.summary),
        style=_file("page.css"),
        script=_file("page.js"),
        picture=picture_svg(picture, with_legend=False),
        legend="\n".join(_legend(picture)),
        rows="\n".join(_row(node, picture) for node in graph.nodes),
        cards=_embedded(_cards(graph, picture)),
    )


def _file(name: str) -> str:
    return files("flowrl.graph.draw").joinpath(name).read_text(encoding="utf-8")


def _legend(picture: Picture) -> Iterator[str]:
    for kind, meaning in legend.entries(picture):
        drawn = legend.sample(kind, 0.5, 7)
        yield f'<li><svg viewBox="0 0 28 14" aria-hidden="true">{drawn}</svg> {text(meaning)}</li>'


def _row(node: Node, picture: Picture) -> str:
    """A line of the table; its button shows the call in the picture."""
    box = picture.box(node.id)
    marks = [*box.notes, *([f"if {node.branch}"] if node.branch else [])]
    cells = [
        f'<button type="button" data-show="{text(node.id)}">{text(node.id)}</button>',
        _names(node.reads),
        _names(node.adds),
        text(", ".join(marks)),
        f"<code>{text(place_of(node))}</code>",
    ]
    return f'<tr data-row="{text(node.id)}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _names(fields: tuple[str, ...]) -> str:
    return ", ".join(f"<code>{text(name)}</code>" for name in fields)


def _cards(graph: Graph, picture: Picture) -> dict[str, object]:
    """What the cards say, by id of box and line, and the order in which the arrow keys walk."""
    cards: dict[str, object] = {}
    for box in picture.boxes:
        cards[box.id] = _node_card(box.node, picture) if box.node else _plain_card(box.tip)
    for line in picture.lines:
        cards[line.id] = _plain_card(line.tip)
    order = [node.id for node in graph.nodes]
    return {"cards": cards, "order": [box.id for box in picture.boxes if box.id not in order] + order}


def _node_card(node: Node, picture: Picture) -> dict[str, object]:
    group, box = picture.group(node.worker), picture.box(node.id)
    return {
        "title": node.id,
        "kind": group.kind if group else "library",
        "signature": node.signature,
        "place": place_of(node),
        "source": node.source,
        "condition": f"if {node.branch}" if node.branch else "",
        "marks": [*box.notes, *([f"cost {node.cost}"] if node.cost not in ("none", "external") else [])],
        "reads": [[name, node.types.get(name, "")] for name in node.reads],
        "adds": [[name, node.types.get(name, "")] for name in node.adds],
    }


def _plain_card(tip: str) -> dict[str, object]:
    title, *rest = tip.split("\n")
    return {"title": title, "text": rest}


def _embedded(record: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or start another."""
    found = json.dumps(record, ensure_ascii=True)
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
