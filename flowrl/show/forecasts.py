"""What the plan of a run foretold beside what happened: seconds of steps and calls, busy pools, memory, lag."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from . import curves, summaries
from .index_run import storable
from .lanes import LOOKED_AT, WHOLE

Line = dict[str, Any]


def compare_forecast(connection: sqlite3.Connection, program: str, forecast: Any) -> list[Line]:
    """A line for each thing that was foretold: what it is, its unit, the forecast and what the run has measured.

    The seconds of a step are the median of the second half of the run. A pool is busy while anything runs in it. Its
    memory is the most that a process of its ranks has had: on a device where there is one, else resident.
    """
    said: Mapping[str, Any] = forecast if isinstance(forecast, dict) else {}
    program = storable(program)
    seconds = [
        value for loop in curves.curves(connection, program, ["seconds"]).get("seconds", ()) for value in loop["mean"]
    ]
    lines = [
        _line("A step", "seconds", said.get("step_seconds"), median(seconds[len(seconds) // 2 :]) if seconds else None)
    ]
    bars = connection.execute(
        "SELECT node, pool, call, step, start, end FROM bars WHERE rank = ? AND program = ? ORDER BY at DESC LIMIT ?",
        (WHOLE, program, LOOKED_AT),
    ).fetchall()
    calls: dict[str, dict[tuple[int, int], list[tuple[float, float]]]] = {}
    pools: dict[str, list[tuple[float, float]]] = {}
    for node, pool, call, step, start, end in bars:
        calls.setdefault(node, {}).setdefault((call, step), []).append((start, end))
        pools.setdefault(pool, []).append((start, end))
    whole = max((bar[5] for bar in bars), default=0.0) - min((bar[4] for bar in bars), default=0.0)
    for node, foretold in _items(said.get("calls")):
        times = [_covered(pieces) for pieces in calls.get(node, {}).values()]
        lines.append(_line(node, "seconds", foretold, sum(times) / len(times) if times else None))
    memory = _memory_of_pools(connection)
    for pool, foretold in _items(said.get("pools")):
        known: Mapping[str, Any] = foretold if isinstance(foretold, dict) else {}
        busy = _covered(pools[pool]) / whole if pool in pools and whole else None
        lines.append(_line(f"Pool {pool} is busy", "share", known.get("busy"), busy))
        lines.append(_line(f"Memory of a process of {pool}", "bytes", known.get("memory"), memory.get(pool)))
    lags = summaries.lags(connection, program)
    groups = sum(count for _, count in lags)
    mean = sum(lag * count for lag, count in lags) / groups if groups else None
    lines.append(_line("Lag of what is trained on", "publishes", said.get("lag"), mean))
    return [line for line in lines if line["foretold"] is not None or line["measured"] is not None] if said else []


def _memory_of_pools(connection: sqlite3.Connection) -> dict[str, float]:
    """The most memory that a rank of each pool has had."""
    found = connection.execute(
        "SELECT bars.pool, max(coalesce(memory.device_peak, memory.resident)) FROM memory JOIN "
        "(SELECT DISTINCT pool, rank FROM bars WHERE rank != ?) AS bars ON memory.process = 'rank ' || bars.rank "
        "GROUP BY bars.pool",
        (WHOLE,),
    )
    return {pool: most for pool, most in found if most is not None}


def _covered(times: Iterable[tuple[float, float]]) -> float:
    """The seconds in which at least one of these runs."""
    seconds, reached = 0.0, -math.inf
    for start, end in sorted(times):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def _line(what: str, unit: str, foretold: Any, measured: float | None) -> Line:
    return {"what": what, "unit": unit, "foretold": _number(foretold), "measured": _number(measured)}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(storable(name), of) for name, of in list(value.items())[:200]] if isinstance(value, dict) else []
