"""A real run in the form of a simulation, so that both are looked at with the same pages."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import shown
from ..placement.plan import Plan
from ..schedule.simulation import Bar, Simulation, pool_times
from .study import pool_text


def measured(run: Path, program: str, plan: Plan, workers: tuple[str, ...] = ()) -> Simulation | None:
    """What a program of a run did, from its ``timeline.jsonl``; None where it has no lines of worker's calls.

    ``workers``: of the flow, in the order of the graph, for the colours.
    """
    lines = [line for line in _lines(run / "timeline.jsonl") if line.get("program") == program and line.get("pool")]
    if not lines:
        return None
    zero = min(line["start"] for line in lines)
    bars = _with_reasons([Bar(n["node"], n["step"], n["pool"], n["start"] - zero, n["end"] - zero) for n in lines])
    seconds = [line["seconds"] for line in _lines(run / "metrics.jsonl") if line.get("program") == program]
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
        {},
        f"measured: {shown(str(run))}",
        plan.pipeline.staleness,
        notes=("measured; what a bar has waited for is taken to be what ended last before it",),
        real=True,
        workers=workers,
    )


def _with_reasons(bars: list[Bar]) -> tuple[Bar, ...]:
    """Bars in the order of their starts, each with the one that ended last before it."""
    ended = sorted((bar.end, bar.node) for bar in bars)
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.end)):
        place = bisect_right(ended, (bar.start, "\uffff"))
        found.append(replace(bar, because=ended[place - 1][1] if place else "the start"))
    return tuple(found)


def _lines(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(text)
