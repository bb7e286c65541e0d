"""A simulation, or a run, in the trace event format, which chrome://tracing and https://ui.perfetto.dev open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ..simulation import Bar, Simulation
from .figures import Lane, lanes, title_of, worker_of

_PROCESS = 1
_SLACK = 1e-9  # of the makespan: below, a bar began when another ended


def render(simulation: Simulation) -> str:
    """One process; a thread per pool, and one more for each further row of bars that overlap.

    A bar that began when one in another pool ended has an arrow from it. Memory is a counter per pool, in GB of 1e9.
    """
    made = lanes(simulation)
    about = {
        "steps": simulation.steps,
        "makespan_s": simulation.makespan,
        "step_s": simulation.step_seconds,
        "staleness": simulation.staleness,
        "cost_source": simulation.cost_source,
        "assumed": list(simulation.assumed),
        "notes": list(simulation.notes),
    }
    threads = _threads(made)
    events = [
        *_names(simulation, threads),
        *(_complete(simulation.bars[i], thread) for thread, (_, row) in threads.items() for i in row),
        *_arrows(simulation, threads),
        *_counters(made),
    ]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def _threads(made: tuple[Lane, ...]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Name and bars of each thread, by number."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for lane in made:
        for number, row in enumerate(lane.rows or ((),)):
            found.append((lane.pool.name if not number else f"{lane.pool.name} ({number + 1})", row))
    return dict(enumerate(found, start=1))


def _names(simulation: Simulation, threads: Mapping[int, tuple[str, tuple[int, ...]]]) -> Iterator[dict[str, Any]]:
    yield _about(0, "process_name", name=f"{simulation.program} ({'run' if simulation.real else 'simulated'})")
    for thread, (name, _) in threads.items():
        yield _about(thread, "thread_name", name=name)
        yield _about(thread, "thread_sort_index", sort_index=thread)


def _about(thread: int, what: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": args}


def _complete(bar: Bar, thread: int) -> dict[str, Any]:
    start, end = _micro(bar.start), _micro(bar.end)
    return {
        "ph": "X",
        "name": bar.node,
        "cat": worker_of(bar.node),
        "pid": _PROCESS,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),
        "args": {"step": bar.step, "piece": bar.chunk, "because": bar.because},
    }


def _micro(seconds: float) -> float:
    """Microseconds, on whole nanoseconds: viewers count in those, and bars that touch must not overlap there."""
    return round(seconds * 1e6, 3)


def _arrows(simulation: Simulation, threads: Mapping[int, tuple[str, tuple[int, ...]]]) -> Iterator[dict[str, Any]]:
    """From what a bar waited for to the bar, where that is seen: it ended in another pool as the bar began."""
    bars, slack = simulation.bars, simulation.makespan * _SLACK
    thread_of = {i: thread for thread, (_, row) in threads.items() for i in row}
    ended: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for end, i in sorted((bar.end, i) for i, bar in enumerate(bars)):
        ended[title_of(bars[i].node)].append((end, i))
    for number, bar in enumerate(bars):
        causes = ended.get(title_of(bar.because), [])
        at = bisect_right(causes, (bar.start + slack, len(bars))) - 1
        if at < 0 or causes[at][0] < bar.start - slack or bars[causes[at][1]].pool == bar.pool:
            continue
        cause = causes[at][1]
        both = {"cat": "waited for", "name": bar.because, "id": number, "pid": _PROCESS}
        inside = max(_micro(bars[cause].start), round(_micro(bars[cause].end) - 0.001, 3))  # else the next bar has it
        yield {"ph": "s", **both, "tid": thread_of[cause], "ts": inside}
        yield {"ph": "f", "bp": "e", **both, "tid": thread_of[number], "ts": _micro(bar.start)}


def _counters(made: tuple[Lane, ...]) -> Iterator[dict[str, Any]]:
    for lane in made:
        name = f"memory of {lane.pool.name}"
        for at, size in lane.pool.memory:
            yield {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": _micro(at), "args": {"GB": size / 1e9}}
