"""What ran when in each pool and on each rank: bars of a part of the time, or how busy lanes were where there are too
many to be seen; what let each begin, and how much memory there was meanwhile."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from typing import Any

BARS = 3000  # that are sent one by one
PARTS = 400  # of the time, where there are more
CHAIN = 12  # calls that are told of, one after the other
LOOKED_AT = 20_000  # calls, the newest, in which it is looked for what pools waited for
WHOLE = -1  # the rank of a bar that is a call

_COLUMNS = (
    *("at", "rank", "program", "step", "node", "pool", "start", "end", "rows", "tokens", "call", "piece"),
    *("issued", "due", "kind", "after", "ready"),
)


def lanes(connection: sqlite3.Connection, begin: float | None, end: float | None) -> dict[str, Any]:
    """The lanes of a run, and what ran in them from ``begin`` to ``end`` in seconds since the run began.

    ``lanes`` are pools, of rank -1, each before its ranks. ``bars`` are single calls, and parts of them on ranks. Where
    these are too many, ``shares`` says for each lane, call and part of the time how much of it that call took.
    """
    first, last = connection.execute("SELECT min(start), max(end) FROM bars").fetchone()
    if first is None:
        nothing: dict[str, Any] = {"first": 0.0, "last": 0.0, "from": 0.0, "to": 0.0}
        return {**nothing, "lanes": [], "nodes": [], "bars": [], "shares": []}
    since: float = first if begin is None else begin
    until: float = max(last if end is None else end, since + 1e-6)
    nodes = [name for (name,) in connection.execute("SELECT node FROM bars GROUP BY node ORDER BY min(at)")]
    longest = connection.execute("SELECT max(end - start) FROM bars").fetchone()[0]
    within = "start < ? AND start > ? AND end > ?"
    window = (until, since - longest - 1e-6, since)
    found = connection.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM bars WHERE {within} LIMIT {BARS + 1}", window
    ).fetchall()
    answer = {"first": first, "last": last, "from": since, "to": until, "lanes": _lanes(connection), "nodes": nodes}
    if len(found) <= BARS:
        return {**answer, "bars": [_with_producer(connection, bar) for bar in map(_named, found)], "shares": []}
    wide = (until - since) / PARTS
    shares: dict[tuple[str, int, str, int], list[float]] = {}
    short = connection.execute(
        "SELECT pool, rank, node, CAST((max(start, ?) - ?) / ? AS INTEGER), "
        "sum(min(end, ?) - max(start, ?)) / ?, count(*) "
        f"FROM bars WHERE {within} AND end - start <= ? GROUP BY 1, 2, 3, 4",
        (since, since, wide, until, since, wide, *window, wide),
    )
    for pool, rank, node, part, share, count in short:
        shares[pool, rank, node, part] = [share, count]
    long = connection.execute(
        f"SELECT pool, rank, node, start, end FROM bars WHERE {within} AND end - start > ? LIMIT ?",
        (*window, wide, PARTS * BARS),
    )
    for pool, rank, node, start, stop in long:
        for part, share in parts_between((max(start, since) - since) / wide, (min(stop, until) - since) / wide):
            found_here = shares.setdefault((pool, rank, node, part), [0.0, 0])
            found_here[:] = found_here[0] + share, found_here[1] + 1
    listed = [
        {"pool": pool, "rank": rank, "node": node, "part": part, "share": share, "count": count}
        for (pool, rank, node, part), (share, count) in shares.items()
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
        "sum(rows), sum(tokens) FROM bars WHERE rank = ? GROUP BY program, node, pool ORDER BY sum(end - start) DESC",
        (WHOLE,),
    )
    return [dict(zip(columns, row, strict=True)) for row in found]


def pool_waits(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """For how long pools had nothing to do before calls began, by what let these begin: the longest in all first.

    A pool waits from the end of what ran there before. Looks at the newest calls alone.
    """
    found = connection.execute(
        "WITH newest AS (SELECT * FROM bars WHERE rank = ? AND pool != '' ORDER BY at DESC LIMIT ?), "
        "gaps AS (SELECT *, start - max(end) OVER (PARTITION BY pool ORDER BY start, at "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS gap FROM newest) "
        "SELECT pool, node, kind, (SELECT node FROM bars AS b WHERE b.program = gaps.program AND b.call = gaps.after "
        "AND b.rank = ? LIMIT 1) AS producer, count(*), sum(gap), max(gap) FROM gaps WHERE gap > 0 "
        "GROUP BY 1, 2, 3, 4 ORDER BY 6 DESC LIMIT 30",
        (WHOLE, LOOKED_AT, WHOLE),
    )
    columns = ("pool", "node", "kind", "producer", "calls", "seconds", "longest")
    return [dict(zip(columns, row, strict=True)) for row in found]


def chain(connection: sqlite3.Connection, at: int) -> list[dict[str, Any]]:
    """A call, and before it those that let each other begin, the newest first; empty where there is no such call."""
    found: list[dict[str, Any]] = []
    bar = _bar(connection, "at = ? AND rank = ?", (at, WHOLE))
    while bar is not None and len(found) < CHAIN:
        found.append(bar)
        bar = _producer(connection, bar)
    return found


def step_times(connection: sqlite3.Connection, program: str, step: int) -> tuple[float, float] | None:
    """When the first call of a step began and the last one ended, with a little room; None for a step without any."""
    first, last = connection.execute(
        "SELECT min(start), max(end) FROM bars WHERE program = ? AND step = ?", (program, step)
    ).fetchone()
    return None if first is None else (first - (last - first) / 40, last + (last - first) / 40)


def memory(connection: sqlite3.Connection, begin: float, end: float) -> dict[str, list[dict[str, Any]]]:
    """The memory of each process in a part of the time: of each of many parts of it the most."""
    wide = max(end - begin, 1e-6) / PARTS
    kinds = ("resident", "children", "device", "device_reserved", "device_peak")
    most = ", ".join(f"max({kind})" for kind in kinds)
    rows = connection.execute(
        f"SELECT process, CAST((time - ?) / ? AS INTEGER) AS part, max(time), {most} FROM memory "
        "WHERE time >= ? AND time <= ? GROUP BY process, part ORDER BY process, part",
        (begin, wide, begin - wide, end + wide),
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for process, _, time, *sizes in rows:
        found.setdefault(process, []).append({"time": time, **dict(zip(kinds, sizes, strict=True))})
    return found


def programs_with_calls(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Each program with the first and the last of its steps that has calls."""
    found = connection.execute(
        "SELECT program, min(step), max(step) FROM bars WHERE step >= 0 GROUP BY program ORDER BY min(at)"
    )
    return [{"program": program, "first": first, "last": last} for program, first, last in found]


def _lanes(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    order: dict[str, int] = {}
    found = connection.execute("SELECT pool, rank FROM bars GROUP BY pool, rank ORDER BY min(at), rank").fetchall()
    for pool, _ in found:
        order.setdefault(pool, len(order))
    return [{"pool": p, "rank": rank} for p, rank in sorted(found, key=lambda lane: (order[lane[0]], lane[1]))]


def _named(bar: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(_COLUMNS, bar, strict=True))


def _with_producer(connection: sqlite3.Connection, bar: dict[str, Any]) -> dict[str, Any]:
    """A bar with the call that let it begin, in short."""
    found = _producer(connection, bar) if bar["rank"] == WHOLE else None
    wanted = ("at", "node", "step", "pool", "start", "end")
    return bar | {"producer": None if found is None else {name: found[name] for name in wanted}}


def _producer(connection: sqlite3.Connection, bar: dict[str, Any]) -> dict[str, Any] | None:
    """The call that let a call begin: the last piece of it that was over by then."""
    if bar["after"] is None:
        return None
    where = "program = ? AND call = ? AND rank = ? AND end <= ? AND at != ?"
    return _bar(connection, where, (bar["program"], bar["after"], WHOLE, bar["start"] + 1e-3, bar["at"]))


def _bar(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> dict[str, Any] | None:
    query = f"SELECT {', '.join(_COLUMNS)} FROM bars WHERE {where} ORDER BY end DESC LIMIT 1"
    found = connection.execute(query, values).fetchone()
    return None if found is None else _named(found)
