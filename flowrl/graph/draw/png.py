"""The graph as a PNG picture, for what takes no SVG; Graphviz draws it, by way of pygraphviz."""

from __future__ import annotations

import threading
from typing import Any

from ...errors import FlowError
from ..record import Graph
from .dot import render as dot

_DRAWING = threading.Lock()  # Graphviz draws one graph at a time


def png(graph: Graph) -> bytes:
    """Return the picture. Raises FlowError without pygraphviz."""
    try:
        from pygraphviz import AGraph  # type: ignore[reportUnknownVariableType]
    except ImportError as error:
        raise FlowError(
            "drawing as png needs pygraphviz, which is not installed.",
            fix="pip install pygraphviz (it brings Graphviz along).",
        ) from error
    with _DRAWING:
        drawn: Any = AGraph(string=dot(graph))
        return drawn.draw(format="png", prog="dot")
