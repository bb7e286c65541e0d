"""The graph as JSON: the documented record (docs/reading_graphs.md), a line per value to compare."""

from __future__ import annotations

import json

from ..record import Graph


def render(graph: Graph) -> str:
    """JSON of the record."""
    return json.dumps(graph.to_json(), indent=1, ensure_ascii=False) + "\n"
