"""Numbers of a run over its steps, as many points as a screen can show."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

POINTS = 800  # of a curve; more are brought together, each with its mean and its range


def metric_names(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """The programs of a run in their order, with the names of what each logged."""
    steps = connection.execute(
        "SELECT program, count(*), max(loop), max(step) FROM lines GROUP BY program ORDER BY min(at)"
    )
    names: dict[str, list[str]] = {}
    for program, name in connection.execute("SELECT program, name FROM names ORDER BY id"):
        names.setdefault(program, []).append(name)
    return [
        {"program": program, "lines": lines, "loops": loops, "last": last, "names": names.get(program, [])}
        for program, lines, loops, last in steps
    ]


def curve(connection: sqlite3.Connection, program: str, name: str, *, points: int = POINTS) -> list[dict[str, Any]]:
    """One metric of a program: for each loop its steps, seconds since the run began, and the values there.

    Where a loop has more than ``points`` values, neighbours are brought together: ``mean``, ``low`` and ``high``.
    """
    found = connection.execute(
        "SELECT lines.loop, lines.step, lines.clock, points.value FROM names JOIN points ON points.name = names.id "
        "JOIN lines ON lines.at = points.at WHERE names.program = ? AND names.name = ? ORDER BY points.at",
        (program, name),
    )
    loops: dict[int, list[tuple[int, float, float]]] = {}
    for loop, step, clock, value in found:
        loops.setdefault(loop, []).append((step, clock, value))
    return [{"loop": loop, **_thinned(values, points)} for loop, values in loops.items()]


def _thinned(values: Sequence[tuple[int, float, float]], points: int) -> dict[str, Any]:
    together = -(-len(values) // points)
    parts = [values[i : i + together] for i in range(0, len(values), together)]
    numbers = [[value for *_, value in part] for part in parts]
    thinned: dict[str, Any] = {
        "count": len(values),
        "last": values[-1][2],
        "step": [part[-1][0] for part in parts],
        "clock": [round(part[-1][1], 3) for part in parts],
        "mean": [sum(some) / len(some) for some in numbers],
    }
    if together > 1:
        thinned |= {"low": [min(some) for some in numbers], "high": [max(some) for some in numbers]}
    return thinned
