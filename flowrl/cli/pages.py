"""The pages of a run: for each of its programs the graph with what was measured, and the timeline."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..flow import Flow
from ..graph.draw import render
from ..graph.record import Graph
from ..placement.plan import Plan
from ..planned.measured import measured, measured_graph
from ..planned.see import edge_records, placed_graph
from ..schedule.report import render as report


def write_pages(
    out: Path, flow: Flow, parameters: Mapping[str, Mapping[str, Any]], plan: Plan | None
) -> dict[str, Path]:
    """Write the pages of the programs of a run into its folder. Returns them by what they show.

    ``parameters`` are those of each program. ``graph.html`` and ``timeline.html`` are those of the program with most
    nodes; another one has its name in its files, as in ``graph.warmup.html``.
    """
    graphs = {name: flow.graph(name, **mine) for name, mine in parameters.items()}
    main = max(graphs, key=lambda name: len(graphs[name].nodes))
    pages: dict[str, Path] = {}
    for name in sorted(graphs, key=lambda name: name != main):
        suffix, title = ("", "") if name == main else (f".{name}", f" of {name}")
        graph, timeline = _measured(out, flow, graphs[name], parameters[name], plan)
        pages[f"graph{title}"] = out / f"graph{suffix}.html"
        pages[f"graph{title}"].write_text(render(graph, "html"), encoding="utf-8")
        if timeline:
            pages[f"timeline{title}"] = out / f"timeline{suffix}.html"
            pages[f"timeline{title}"].write_text(timeline, encoding="utf-8")
    return pages


def _measured(
    out: Path, flow: Flow, graph: Graph, parameters: Mapping[str, Any], plan: Plan | None
) -> tuple[Graph, str]:
    """A program's graph with what the run has measured of it, and its timeline; the graph alone where it has not."""
    flown = measured(out, graph.program, plan or Plan.one_process(), tuple(h.name for h in flow.handles))
    if flown is None:
        return graph, ""
    if plan is not None:
        with suppress(ModelError):  # of a model whose size is not known here: the graph without its plan
            graph = placed_graph(flow.study(plan, graph.program, **parameters), graph)
    graph = measured_graph(graph, out, flown)
    return graph, report(replace(flown, edges=tuple(edge_records(graph))), "html")
