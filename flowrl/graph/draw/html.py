"""The graph as one page to explore: picture, pan, zoom, cards, a table of all calls. Nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template

from ...errors import shown
from ..record import Graph, Node
from . import legend
from . import plan_in_words as placed
from .fold_arithmetic import folded
from .layout.single_column import column, column_svg
from .picture import MOVES, Picture, draw, given, place_of
from .strokes import text
from .svg import COLUMN, picture_svg


def render(graph: Graph) -> str:
    """The page of the graph. Raises FlowError where pygraphviz is missing."""
    graph = folded(graph)
    picture = draw(graph)
    home = next((shown(node.file) for node in graph.nodes if node.file), "")
    return Template(_file("page.html")).substitute(
        program=text(graph.program),
        home=text(home),
        summary=text(picture.summary),
        style=_file("page.css"),
        script=_file("page.js"),
        pictures="".join(_pictures(graph, picture)),
        legend="\n".join(_legend(picture)),
        pools=_pools(graph),
        columns="".join(f'<th scope="col">{name}</th>' for name in _columns(picture)),
        rows="\n".join(_row(node, picture) for node in graph.nodes),
        cards=_embedded(_cards(graph, picture)),
    )


def _pictures(graph: Graph, picture: Picture) -> Iterator[str]:
    """The picture as wide as it is, if a screen is as wide, and as a column; the page shows the one that fits."""
    narrow = column(graph)
    yield picture_svg(picture, with_legend=False) or column_svg(narrow, with_legend=False, wide=COLUMN)
    yield column_svg(narrow, with_legend=False)


def _file(name: str) -> str:
    return files("flowrl.graph.draw").joinpath(name).read_text(encoding="utf-8")


def _legend(picture: Picture) -> Iterator[str]:
    for kind, meaning in legend.entries(picture):
        drawn = legend.sample(kind, 0.5, 7)
        yield f'<li><svg class="flowrl" viewBox="0 0 28 14" aria-hidden="true">{drawn}</svg> {text(meaning)}</li>'


def _pools(graph: Graph) -> str:
    """A table of the pools, if there are any; their time is there after a run."""
    pools = placed.pools_of(graph)
    names = ["pool", "has"] + ["works", "per step"] * any(pool.busy is not None for pool in pools)
    rows: list[str] = []
    for pool in pools:
        cells = [f"<b>{text(pool.name)}</b>", text(placed.pool_text(pool))]
        if len(names) > 2:
            meter = f'<meter min="0" max="1" value="{pool.busy:.3f}"></meter> ' if pool.busy is not None else ""
            cells.append("" if pool.busy is None else meter + placed.part_text(pool.busy))
            cells.append("" if pool.seconds is None else placed.seconds_text(pool.seconds))
        rows.append(f'<tr data-pool="{text(pool.name)}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>"
    return f'<section class="calls" aria-label="All pools">\n{table}\n</section>\n' if pools else ""


def _columns(picture: Picture) -> tuple[str, ...]:
    """The columns of the table of calls: where they are placed and their time are in it where they are known."""
    there = {"where": any(group.pool for group in picture.groups), "time": any(box.time for box in picture.boxes)}
    return ("call", "reads", "adds", "effect", *(name for name, found in there.items() if found), "line")


def _row(node: Node, picture: Picture) -> str:
    """A line of the table; its button shows the call in the picture."""
    box = picture.box(node.id)
    effects = [*box.notes, *([f"if {node.branch}"] if node.branch else [])]
    settings = node.expression or given(node)
    cells = [
        f'<button type="button" data-show="{text(node.id)}">{text(node.id)}</button>'
        + (f'<code class="said">{text(settings)}</code>' if settings else ""),
        _names(node.reads),
        _names(node.adds),
        text(", ".join(effects)),
        *_placed(node, picture),
        f"<code>{text(place_of(node))}</code>",
    ]
    return f'<tr data-row="{text(node.id)}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _placed(node: Node, picture: Picture) -> list[str]:
    where = [f"<b>{text(node.pool)}</b>"] if node.pool else []
    where += [text(row) for row in placed.place_rows(node)]
    cells = {"where": "<br>".join(where), "time": text(placed.time_text(node)).replace(" ", "\u00a0")}
    return [cells[name] for name in _columns(picture) if name in cells]


def _names(fields: tuple[str, ...]) -> str:
    return ", ".join(f"<code>{text(name)}</code>" for name in fields)


def _cards(graph: Graph, picture: Picture) -> dict[str, object]:
    """Return what the cards say, by id of box and line, and the order in which the arrow keys walk."""
    cards: dict[str, object] = {}
    kinds = {worker.name: worker.kind for worker in graph.workers}
    for box in picture.boxes:
        cards[box.id] = _node_card(box.node, picture, kinds) if box.node else _plain_card(box.tip)
    for line in picture.lines:
        cards[line.id] = _plain_card(line.tip)
    order = [node.id for node in graph.nodes]
    return {"cards": cards, "order": [box.id for box in picture.boxes if box.id not in order] + order}


def _node_card(node: Node, picture: Picture, kinds: Mapping[str, str]) -> dict[str, object]:
    box, plan = picture.box(node.id), placed.place_lines(node)
    return {
        "title": node.id,
        "kind": kinds.get(node.worker, "library"),
        "signature": node.expression or node.signature or MOVES.get(node.kind, ""),
        "place": place_of(node),
        "source": node.source,
        "condition": f"if {node.branch}" if node.branch else "",
        "marks": [
            *box.notes,
            *([node.loss] if node.loss else []),
            *(f"{name}={value}" for name, value in node.settings.items()),
            *([f"cost {node.cost}"] if node.cost not in ("none", "external") else []),
        ],
        "reads": [[name, node.types.get(name, "")] for name in node.reads],
        "adds": [[name, node.types.get(name, "")] for name in node.adds],
        **({"plan": plan} if plan else {}),
    }


def _plain_card(tip: str) -> dict[str, object]:
    title, *rest = tip.split("\n")
    return {"title": title, "text": rest}


def _embedded(record: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or start another."""
    plain = json.dumps(record, ensure_ascii=True)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
