"""What a run did, drawn from its folder alone: the graph of each program with what was measured, and its timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError, did_you_mean
from ..graph.draw import render
from ..graph.record import Graph
from ..placement.plan.plan import Plan
from ..placement.plan.plan_file import read
from ..runtime.storage.run_record import read_record
from ..schedule.report import render as report
from ..schedule.simulation import Simulation
from .measured_run import measured, measured_graph
from .placed_graph import edge_records


def programs_of(run: Path) -> tuple[str, ...]:
    """The programs of a run, the one with most nodes first. Raises UsageError for a folder that holds no run."""
    graphs = _graphs(_record(run), run)
    return tuple(sorted(graphs, key=lambda name: -len(graphs[name]["nodes"])))


def look_at(run: Path, program: str | None = None) -> tuple[Graph, Simulation | None]:
    """The graph of a program of a run with what was measured so far, and its timeline, None where no step is done.

    Without a name it is the program with most nodes. Of a run with a plan the graph has its places. Raises UsageError
    for a folder that holds no run and for another program.
    """
    record = _record(run)
    name = program or programs_of(run)[0]
    graphs = _graphs(record, run)
    if name not in graphs:
        fix = did_you_mean(name, graphs, form="Write --program {}.")
        raise UsageError(f"the run in {run} has no program '{name}'.", have=list(graphs), fix=fix)
    graph = replace(Graph.from_json(graphs[name]), program=name)
    flown = measured(run, name, _plan(record), tuple(worker.name for worker in graph.workers))
    if flown is None:
        return graph, None
    graph = measured_graph(graph, run, flown)
    return graph, replace(flown, edges=tuple(edge_records(graph)))


def write_pages(run: Path) -> dict[str, Path]:
    """Write the pages of the programs of a run into its folder. Returns them by what they show.

    ``graph.html`` and ``timeline.html`` are those of the program with most nodes; another one has its name in its
    files, as in ``graph.warmup.html``. A program that has done no step yet has no timeline.
    """
    pages: dict[str, Path] = {}
    for place, name in enumerate(programs_of(run)):
        suffix, title = (f".{name}", f" of {name}") if place else ("", "")
        graph, flown = look_at(run, name)
        pages[f"graph{title}"] = run / f"graph{suffix}.html"
        pages[f"graph{title}"].write_text(render(graph, "html"), encoding="utf-8")
        if flown is not None:
            pages[f"timeline{title}"] = run / f"timeline{suffix}.html"
            pages[f"timeline{title}"].write_text(report(flown, "html"), encoding="utf-8")
    return pages


def _record(run: Path) -> Mapping[str, Any]:
    if not (run / "run.json").exists() and not (run / "checkpoints").exists():
        raise UsageError(f"{run} holds no run.", fix="Name the folder that a run was recorded in, with --out.")
    return read_record(run)[0]


def _graphs(record: Mapping[str, Any], run: Path) -> Mapping[str, Any]:
    """The recorded graphs by program; a run of an earlier flowrl has one alone."""
    graphs = record.get("graphs") or ({record["graph"]["program"]: record["graph"]} if record.get("graph") else None)
    if not graphs:
        raise UsageError(f"the run in {run} has no graph in its run.json.", fix="Run it again: flowrl run records it.")
    return graphs


def _plan(record: Mapping[str, Any]) -> Plan:
    plan = record.get("plan")
    return read(json.dumps(plan), "the plan of the run") if plan else Plan.one_process()
