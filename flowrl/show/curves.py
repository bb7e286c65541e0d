"""Numbers of a run over its steps, as many points as a screen can show."""

from __future__ import annotations

import sqlite3
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
    lines = connection.execute("SELECT at, loop, step, clock FROM lines WHERE program = ? ORDER BY at", (program,))
    places: dict[int, tuple[int, float]] = {}
    begins: dict[int, int] = {}  # where the first line of each loop is
    for at, loop, step, clock in lines:
        places[at] = step, clock
        begins.setdefault(loop, at)
    return {name: _loops(*_points(connection, program, name), places, begins, points) for name in names}


def _points(connection: sqlite3.Connection, program: str, name: str) -> tuple[array[int], array[float]]:
    """Where the lines of a metric are, and its numbers."""
    ats, numbers = array("q"), array("d")
    blocks = connection.execute(
        "SELECT ats, numbers FROM points WHERE name = (SELECT id FROM names WHERE program = ? AND name = ?) "
        "ORDER BY last_at",
        (program, name),
    )
    for some_ats, some_numbers in blocks:
        ats.frombytes(some_ats)
        numbers.frombytes(some_numbers)
    return ats, numbers


def _loops(
    ats: array[int],
    numbers: array[float],
    places: Mapping[int, tuple[int, float]],
    begins: Mapping[int, int],
    most: int,
) -> list[dict[str, Any]]:
    """The values of each loop that has any, brought together to ``most`` points."""
    edges = [bisect_left(ats, at) for at in begins.values()] + [len(ats)]
    found = []
    for loop, (begin, end) in zip(begins, pairwise(edges), strict=True):
        if begin == end:
            continue
        together = -(-(end - begin) // most)
        parts = [numbers[i : min(i + together, end)] for i in range(begin, end, together)]
        last = [places[ats[min(i + together, end) - 1]] for i in range(begin, end, together)]
        curve: dict[str, Any] = {
            "loop": loop,
            "count": end - begin,
            "last": numbers[end - 1],
            "step": [step for step, _ in last],
            "clock": [round(clock, 3) for _, clock in last],
            "mean": [sum(part) / len(part) for part in parts],
        }
        if together > 1:
            curve |= {"low": [min(part) for part in parts], "high": [max(part) for part in parts]}
        found.append(curve)
    return found
