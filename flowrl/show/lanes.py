"""What ran when: the bars of a part of the time, or how busy pools were where there are too many to be seen."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from typing import Any

BARS = 3000  # that are sent one by one
PARTS = 400  # of the time, where there are more


def lanes(connection: sqlite3.Connection, begin: float | None, end: float | None) -> dict[str, Any]:
    """The pools of a run, and what ran in them from ``begin`` to ``end`` in seconds since the run began.

    ``bars`` are single calls. Where these are too many, ``shares`` says for each pool, call and part of the time how
    much of it that call took.
    """
    first, last = connection.execute("SELECT min(start), max(end) FROM bars").fetchone()
    if first is None:
        return {"first": 0.0, "last": 0.0, "from": 0.0, "to": 0.0, "pools": [], "nodes": [], "bars": [], "shares": []}
    since: float = first if begin is None else begin
    until: float = max(last if end is None else end, since + 1e-6)
    pools = [name for (name,) in connection.execute("SELECT pool FROM bars GROUP BY pool ORDER BY min(at)")]
    nodes = [name for (name,) in connection.execute("SELECT node FROM bars GROUP BY node ORDER BY min(at)")]
    longest = connection.execute("SELECT max(end - start) FROM bars").fetchone()[0]
    within = "start < ? AND start > ? AND end > ?"
    window = (until, since - longest - 1e-6, since)
    columns = ("program", "step", "node", "pool", "start", "end", "rows", "tokens", "call", "piece")
    found = connection.execute(
        f"SELECT {', '.join(columns)} FROM bars WHERE {within} LIMIT {BARS + 1}", window
    ).fetchall()
    answer = {"first": first, "last": last, "from": since, "to": until, "pools": pools, "nodes": nodes}
    if len(found) <= BARS:
        return {**answer, "bars": [dict(zip(columns, bar, strict=True)) for bar in found], "shares": []}
    wide = (until - since) / PARTS
    shares: dict[tuple[str, str, int], list[float]] = {}
    short = connection.execute(
        f"SELECT pool, node, CAST((max(start, ?) - ?) / ? AS INTEGER), sum(min(end, ?) - max(start, ?)) / ?, count(*) "
        f"FROM bars WHERE {within} AND end - start <= ? GROUP BY 1, 2, 3",
        (since, since, wide, until, since, wide, *window, wide),
    )
    for pool, node, part, share, count in short:
        shares[pool, node, part] = [share, count]
    long = connection.execute(
        f"SELECT pool, node, start, end FROM bars WHERE {within} AND end - start > ? LIMIT ?",
        (*window, wide, PARTS * BARS),
    )
    for pool, node, start, stop in long:
        for part, share in parts_between((max(start, since) - since) / wide, (min(stop, until) - since) / wide):
            found_here = shares.setdefault((pool, node, part), [0.0, 0])
            found_here[:] = found_here[0] + share, found_here[1] + 1
    listed = [
        {"pool": pool, "node": node, "part": part, "share": share, "count": count}
        for (pool, node, part), (share, count) in shares.items()
    ]
    return {**answer, "bars": [], "shares": listed, "wide": wide}


def parts_between(start: float, end: float) -> Iterator[tuple[int, float]]:
    """The parts from ``start`` to ``end``, counted in parts, with how much of each lies between them.

    >>> list(parts_between(0.5, 2.25))
    [(0, 0.5), (1, 1), (2, 0.25)]
    """
    for part in range(int(start), min(PARTS, math.ceil(end))):
        yield part, min(end, part + 1) - max(start, part)


def busiest(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Each call of the program with how often it ran, how long, and on how many rows and tokens."""
    columns = ("program", "node", "pool", "calls", "seconds", "longest", "rows", "tokens")
    found = connection.execute(
        "SELECT program, node, pool, count(DISTINCT call || ' ' || step), sum(end - start), max(end - start), "
        "sum(rows), sum(tokens) FROM bars GROUP BY program, node, pool ORDER BY sum(end - start) DESC"
    )
    return [dict(zip(columns, row, strict=True)) for row in found]
