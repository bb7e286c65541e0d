"""A real run in the form of a simulation, so that both are looked at with the same pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from math import floor, inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import PlanError, UsageError, shown
from ..graph.record import Graph
from ..placement.cost.continuous_batch import Turns
from ..placement.cost.length_distribution import Lengths
from ..placement.plan.plan import Plan
from ..runtime.storage.run_record import records_within
from ..schedule.simulation import Bar, Simulation, pool_times
from .moved_bytes import moved, sampled_lengths, with_moved
from .placed_graph import overlaid
from .row_lengths import Tokens
from .study import pool_text


def measured(run: Path, program: str, plan: Plan, workers: tuple[str, ...] = ()) -> Simulation | None:
    """Return what a program of a run did, from its ``timeline.jsonl``; None where it has no lines of worker's calls.

    ``workers``: of the flow, in the order of the graph, for the colours.
    """
    records = records_within(run / "timeline.jsonl")
    lines = [line for line in records if line.get("program") == program and line.get("pool")]
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
                chunk=n.get("piece", 0),
                call=n.get("call", -1),
            )
            for n in lines
        ]
    )
    seconds = [line["seconds"] for line in records_within(run / "metrics.jsonl") if line.get("program") == program]
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
    bytes_moved = moved(run, flown.program)
    return overlaid(graph if bytes_moved is None else with_moved(graph, bytes_moved), flown)


def tokens_of_run(run: Path, program: str, *, varies: bool = True) -> Tokens:
    """The lengths of rows that a program of a run has sampled: their quantiles, or with ``varies=False`` their mean.

    Raises UsageError for a folder that is no run, PlanError for a program that has sampled nothing there.
    """
    sampled = sampled_lengths(run, program)
    if sampled is None:
        traffic = run / "traffic.jsonl"
        if not traffic.exists():
            what = f"{shown(str(run))} is no folder of a run: it has no {traffic.name}."
            raise UsageError(what, fix="Name the folder that flowrl run --out DIR wrote.")
        have = dict.fromkeys(str(line["program"]) for line in records_within(traffic) if line.get("responses"))
        what = f"the run {shown(str(run))} has no rows that '{program}' has sampled."
        raise PlanError(what, have=list(have), fix="Name a run of this program.")
    prompt, quantiles, alike = sampled
    if varies:
        return Tokens(prompt, "measured", quantiles, shown(str(run)), min(alike, 1.0))
    return Tokens(prompt, "fixed", (Lengths(prompt, inf, "measured", quantiles).mean,), source=shown(str(run)))


def with_turns_of(run: Path, program: str, tokens: Tokens) -> Tokens:
    """The same lengths with the turns of the episodes that a program of a run has played, where it says them."""
    found = turns_of_run(run, program)
    return replace(tokens, measured_turns=found, turns_source=shown(str(run))) if found else tokens


def turns_of_run(run: Path, program: str) -> dict[str, Turns]:
    """The turns of the episodes of each call of a program, by its node; none for a run that does not say them.

    There are as many as an average episode had, rounded, and it waits as long for its environment in all.
    """
    steps: dict[str, list[tuple[float, float]]] = {}  # turns of an average episode, seconds between two
    for line in records_within(run / "metrics.jsonl"):
        for name in line if line.get("program") == program else ():
            call, _, what = name.rpartition("/")
            turns = _measure(line, name) if what == "turns" and call else None
            seconds = _measure(line, f"{call}/environment_seconds")
            if turns is not None and (seconds is not None or turns <= 1):
                steps.setdefault(call, []).append((turns, seconds or 0.0))
    return {call: _turns(known) for call, known in steps.items()}


def _measure(line: Mapping[str, Any], name: str) -> float | None:
    """A number of at least 0 in a line of metrics; None where there is none."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if isfinite(value) and value >= 0 else None


def _turns(steps: list[tuple[float, float]]) -> Turns:
    """Turns that stand for those of several steps."""
    waits = sum(max(0.0, turns - 1) for turns, _ in steps)
    waited = sum(max(0.0, turns - 1) * seconds for turns, seconds in steps)
    if not waits:
        return Turns(1, 0.0)
    count = max(2, floor(1.5 + waits / len(steps)))
    return Turns(count, round(waited / len(steps) / (count - 1), 6))


def _with_reasons(bars: list[Bar]) -> tuple[Bar, ...]:
    """Bars in the order of their starts, each with the one that ended last before it."""
    ended = sorted((bar.end, bar.node) for bar in bars)
    explained: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.end)):
        place = bisect_right(ended, (bar.start, "\uffff"))
        explained.append(replace(bar, because=ended[place - 1][1] if place else "the start"))
    return tuple(explained)
