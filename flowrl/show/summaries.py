"""A run in short: how it is, its ledger, the lag of its rows, what moved, and its events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from ..trackers.tracker import level_of

POINTS = 400  # of a curve of the ledger
EVENTS = 200  # on a page
LONG = 2000  # characters of a value of the record
KEPT = (
    *(
        "script",
        "arguments",
        "programs",
        "parameters",
        "seed",
        "runtime",
        "status",
        "host",
        "device",
        "commit",
        "dirty",
    ),
    *("started", "ended", "versions", "id", "weights_digest", "best"),
)


def counts(connection: sqlite3.Connection) -> dict[str, Any]:
    """How many steps, alarms and rows a run has, and the reward that was logged last."""
    steps = connection.execute("SELECT count(*), max(clock) FROM lines").fetchone()
    kinds = connection.execute("SELECT kind, count(*) FROM events GROUP BY kind").fetchall()
    rows = connection.execute("SELECT coalesce(sum(rows), 0) FROM kinds").fetchone()
    reward = connection.execute(
        "SELECT last FROM points WHERE name IN (SELECT id FROM names WHERE name = 'reward') "
        "ORDER BY last_at DESC LIMIT 1"
    ).fetchone()
    return {
        "lines": steps[0],
        "seconds": steps[1],
        "alarms": sum(count for kind, count in kinds if level_of(kind) == "alarm"),
        "rows": rows[0],
        "reward": reward[0] if reward else None,
    }


def about(record: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says that people ask about, with long values cut."""
    found = {name: record[name] for name in KEPT if name in record}
    return {name: _short(value) for name, value in found.items()} | {"plan": _short(record.get("plan"))}


def ledger(connection: sqlite3.Connection, program: str) -> dict[str, Any]:
    """What became of a program's rows: the newest line, and a line for each of many steps."""
    total = connection.execute("SELECT count(*) FROM ledger WHERE program = ?", (program,)).fetchone()[0]
    apart = max(1, total // POINTS)
    found = connection.execute(
        "SELECT step, what FROM (SELECT step, what, row_number() OVER (ORDER BY at) AS place FROM ledger "
        "WHERE program = ?) WHERE place % ? = 0 OR place = ?",
        (program, apart, total),
    )
    lines = [{"step": step, **_counted(json.loads(what))} for step, what in found]
    return {"lines": lines, "lags": lags(connection, program), "traffic": traffic(connection, program)}


def lags(connection: sqlite3.Connection, program: str) -> list[tuple[int, int]]:
    """How many prompt groups were trained on with each lag: publishes between their oldest token and the weights."""
    return connection.execute(
        "SELECT lag, sum(groups) FROM lags WHERE program = ? GROUP BY lag ORDER BY lag", (program,)
    ).fetchall()


def traffic(connection: sqlite3.Connection, program: str) -> dict[str, float]:
    """The bytes that an average step of a program read, made and published."""
    names = ("steps", "read", "made", "weights")
    found = connection.execute(
        "SELECT count(DISTINCT step), sum(read), sum(made), sum(weights) FROM traffic WHERE program = ?", (program,)
    ).fetchone()
    steps = max(1, found[0])
    return {name: (value or 0) / (1 if name == "steps" else steps) for name, value in zip(names, found, strict=True)}


def events(connection: sqlite3.Connection, kind: str, before: int | None) -> dict[str, Any]:
    """A page of events, the newest first, and how many there are of each kind."""
    where, values = "at < ?", [1 << 62 if before is None else before]
    if kind:
        where, values = f"{where} AND kind = ?", [*values, kind]
    rows = connection.execute(
        f"SELECT at, time, kind, text, size FROM events WHERE {where} ORDER BY at DESC LIMIT {EVENTS + 1}", values
    ).fetchall()
    names = ("at", "time", "kind", "text", "size")
    listed = [{**dict(zip(names, row, strict=True)), "level": level_of(row[2])} for row in rows]
    kinds = connection.execute("SELECT kind, count(*) FROM events GROUP BY kind ORDER BY kind").fetchall()
    return {
        "events": listed[:EVENTS],
        "next": listed[EVENTS - 1]["at"] if len(listed) > EVENTS else None,
        "kinds": kinds,
    }


def _counted(line: Any) -> dict[str, Any]:
    """The counts of prompts and rows of a line of the ledger, as far as it has such."""
    if not isinstance(line, dict):
        return {}
    return {what: line[what] for what in ("prompts", "rows") if isinstance(line.get(what), dict)}


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= LONG:
        return value
    return f"{text[:LONG]}... ({len(text)} characters)"
