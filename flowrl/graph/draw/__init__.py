"""How a graph is shown: text, Mermaid, Graphviz, JSON, SVG, a page to explore. One module per format."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ...errors import UsageError, near

if TYPE_CHECKING:
    from ..record import Graph

FORMATS = ("text", "mermaid", "dot", "json", "svg", "html")


def render(graph: Graph, format: str, *, narrow: bool = False) -> str:
    """The graph in one of :data:`FORMATS`. ``narrow`` draws the svg as one column, for the screen of a phone.

    Raises UsageError for another one, and FlowError where pygraphviz is missing, which svg and html need.

    >>> flow = fl.Flow("example")
    >>> actor = flow.worker(fl.Actor, "a/model")
    >>> @flow.program
    ... def example():
    ...     for step, batch in flow.steps(fl.data.rows([{"prompt": "1+2="}], batch=1), 3):
    ...         flow.log(step, tokens=actor.generate(batch).tokens.mean())
    >>> fl.render(flow.graph(), "mermaid").splitlines()[0]
    'flowchart TB'
    """
    if format not in FORMATS:
        fix = f"Use --format {near(format, FORMATS) or 'text'}."
        raise UsageError(f"there is no graph format '{format}'.", have=", ".join(FORMATS), fix=fix)
    if narrow and format == "svg":
        module = import_module(".layout.single_column", __name__)
        return module.column_svg(module.column(graph))
    return import_module(f".{format}", __name__).render(graph)
