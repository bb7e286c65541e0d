"""A real run in the form of a simulation, so that both are looked at with the same pages."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from statistics import median

from ..errors import shown
from ..graph.record import Graph
from ..placement.plan import Plan
from ..schedule.simulation import Bar, Simulation, pool_times
from .moved import lines_of, moved, with_moved
from .see import overlaid
from .study import pool_text


def measured(run: Path, program: str, plan: Plan, workers: tuple[str, ...] = ()) -> Simulation | None:
    """What a program of a run did, from its ``timeline.jsonl``; None where it has no lines of worker's calls.

    ``workers``: of the flow, in the order of the graph, for the colours.
    """
    lines = [line for line in lines_of(run / "timeline.jsonl") if line.get("program") == program and line.get("pool")]
    if not lines:
        return None
    zero = min(line["start"] for line in lines)
    bars = _with_reasons(
        [
            Bar(
                n["node"],
                n["step"],
                n["pool"],
                n["start"] - zero,
                n["end"] - zero,
                piece=n.get("piece", 0),
                call=n.get("call", -1),
            )
            for n in lines
        ]
    )
    seconds = [line["seconds"] for line in lines_of(run / "metrics.jsonl") if line.get("program") == program]
    traffic = moved(run, program)
    makespan = max(bar.end for bar in bars)
    used = dict.fromkeys(bar.pool for bar in bars)
    pools = {name: pool_text(plan, name) if name in plan.pools else "" for name in used}
    return Simulation(
        program,
        len({bar.step for bar in bars}),
        makespan,
        median(seconds[len(seconds) // 2 :]) if seconds else makespan,
        bars,
        pool_times(pools, bars, makespan),
        traffic.lags if traffic is not None else {},
        f"measured: {shown(str(run))}",
        plan.pipeline.staleness,
        notes=("measured; what a bar has waited for is taken to be what ended last before it",),
        real=True,
        workers=workers,
    )


def measured_graph(graph: Graph, run: Path, flown: Simulation) -> Graph:
    """The graph of a program with what a run of it has measured: bytes of its edges, seconds, how busy pools were."""
    found = moved(run, flown.program)
    return overlaid(graph if found is None else with_moved(graph, found), flown)


def _with_reasons(bars: list[Bar]) -> tuple[Bar, ...]:
    """Bars in the order of their starts, each with the one that ended last before it."""
    ended = sorted((bar.end, bar.node) for bar in bars)
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.end)):
        place = bisect_right(ended, (bar.start, "\uffff"))
        found.append(replace(bar, because=ended[place - 1][1] if place else "the start"))
    return tuple(found)
