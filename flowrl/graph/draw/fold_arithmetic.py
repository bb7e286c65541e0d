"""Arithmetic drawn as the expression that it is: its parts have no boxes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..record import Edge, Graph, Node

_ROWS = ("filter", "concat")  # what gives rows, not a part of an expression


def folded(graph: Graph) -> Graph:
    """The graph without the arithmetic that another call's expression says in full, and that nothing else reads."""
    into = {node.id: whole for node in graph.nodes if (whole := _whole(node, graph)) is not None}
    if not into:
        return graph
    edges = [replace(e, src=_end(e.src, into), dst=_end(e.dst, into)) for e in graph.edges]
    nodes = tuple(_widened(node, graph, into) for node in graph.nodes if node.id not in into)
    return replace(graph, nodes=nodes, edges=_merged(e for e in edges if e.src != e.dst or e.kind == "carried"))


def _whole(node: Node, graph: Graph) -> str | None:
    """The one call that a part of an expression goes into; None for what has a box of its own."""
    if node.worker != "batch" or not node.expression or node.op in _ROWS:
        return None
    out = [edge for edge in graph.edges if edge.src == node.id]
    readers = {edge.dst for edge in out}
    if len(readers) != 1 or any(edge.kind != "data" for edge in out):
        return None
    reader = next((n for n in graph.nodes if n.id in readers), None)
    if reader is None or reader.worker != "batch" or node.expression not in reader.expression:
        return None
    return reader.id if (reader.branch, reader.stage) == (node.branch, node.stage) else None


def _end(id: str, into: Mapping[str, str]) -> str:
    while id in into:
        id = into[id]
    return id


def _widened(node: Node, graph: Graph, into: Mapping[str, str]) -> Node:
    """A call that also reads what its parts read."""
    parts = [part for part in graph.nodes if part.id in into and _end(part.id, into) == node.id]
    if not parts:
        return node
    reads = [name for part in (*parts, node) for name in part.reads if name != "value"]
    types = {name: type_ for part in parts for name, type_ in part.types.items()}
    return replace(node, reads=tuple(dict.fromkeys(reads)), types={**types, **node.types})


def _merged(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """One edge where several parts of an expression read the same call."""
    merged: dict[tuple[object, ...], Edge] = {}
    for edge in edges:
        key = (edge.src, edge.dst, edge.kind, edge.branch)
        merged[key] = _both(merged[key], edge) if key in merged else edge
    return tuple(merged.values())


def _both(one: Edge, other: Edge) -> Edge:
    pairs = dict(zip(one.fields, one.made or one.fields, strict=True))
    more = dict(zip(other.fields, other.made or other.fields, strict=True))
    names = {**more, **pairs}
    order = tuple(dict.fromkeys((*one.fields, *other.fields)))
    origins = tuple(names[name] for name in order)
    sizes = [edge.bytes for edge in (one, other) if edge.bytes is not None]
    return replace(
        one,
        fields=order,
        made=() if origins == order else origins,
        repeats=one.repeats or other.repeats,
        bytes=sum(sizes) if sizes else None,
    )
