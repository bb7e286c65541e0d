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


def curves(
    connection: sqlite3.Connection, program: str, names: Sequence[str], *, points: int = POINTS
) -> dict[str, list[dict[str, Any]]]:
    """Metrics of a program by name: for each loop its steps, seconds since the run began, and the values there.

    Where a loop has more than ``points`` values, neighbours are brought together: ``mean``, ``low`` and ``high``.
    """
    lines = connection.execute("SELECT at, loop, step, clock FROM lines WHERE program = ?", (program,))
    places = {at: (loop, step, clock) for at, loop, step, clock in lines}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        loops: dict[int, list[tuple[int, float, float]]] = {}
        named = "SELECT id FROM names WHERE program = ? AND name = ?"
        values = connection.execute(f"SELECT at, value FROM points WHERE name = ({named}) ORDER BY at", (program, name))
        for at, value in values:
            loop, step, clock = places[at]
            loops.setdefault(loop, []).append((step, clock, value))
        found[name] = [{"loop": loop, **_thinned(points_, points)} for loop, points_ in loops.items()]
    return found


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
