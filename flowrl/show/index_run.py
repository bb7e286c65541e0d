"""How lines of a run's files become rows of its index: what is small first, trajectories in portions after it."""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from .read_lines import FoundLine, is_as_it_was, last_end, lines_before, mark_at, new_lines
from .row_labels import KindsOfRows
from .store import Store

PORTION = 10_000  # lines that are written at once
PORTION_BYTES = 16 << 20
MIDDLE, TURNS = 1 << 30, 1 << 20  # of the numbers of rows
SEARCHED = 100_000  # characters of a row that are searched
EVENT = 4000  # characters of an event that the list of events has

SMALL = (
    ("metrics", "events"),
    ("timeline", "ledger", "traffic", "memory"),
)  # files of a few lines a step; the first come first

Writer = Callable[[sqlite3.Connection, Sequence[FoundLine]], None]


@dataclass(frozen=True)
class TakenIn:
    """What of a file is in the index: the bytes from ``begin`` to ``position``, with the checksum before that place.

    ``skipped`` lines were left out. ``turn`` is how many times the file was found written anew.
    """

    begin: int = 0
    position: int = 0
    mark: int = 0
    skipped: int = 0
    turn: int = 0


class Indexer:
    """Keeps the index of a run up to its files."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._seen: dict[str, tuple[int, int]] = {}  # size and time of files in which nothing was new
        self._made = store.made

    def small(self) -> bool:
        """Take in a portion of each file but the trajectories, the curves first. Returns whether anything was new."""
        return any(any([self._portion(name) for name in names]) for names in SMALL)

    def trajectories(self) -> bool:
        """Take in a portion of the trajectories: what is new, else what comes before. Returns whether anything was.

        Of a file that is large when it is first seen the last rows come first, as they are what is mostly looked for.
        """
        return self._portion("trajectories") or self._before("trajectories")

    def _portion(self, name: str) -> bool:
        path = self.store.run / f"{name}.jsonl"
        if self._made != self.store.made:
            self._made, self._seen = self.store.made, {}
        if (now := _size_and_time(path)) == self._seen.get(name):
            return False
        new = self._take_in(name, path)
        if not new:
            self._seen[name] = now
        return new

    def _take_in(self, name: str, path: Path) -> bool:
        rows = name == "trajectories"
        with self.store.reading() as connection:
            taken = taken_in(connection, name)
        anew, before = not is_as_it_was(path, taken.position, taken.mark), taken.position
        if anew:
            taken = TakenIn(turn=taken.turn + 1)
        try:
            with path.open("rb") as file:
                if rows and not taken.position:
                    end = last_end(file)
                    taken = replace(taken, begin=end, position=end) if end > PORTION_BYTES else taken
                lines = list(_portion_of(new_lines(file, taken.position, short=rows)))
                end = lines[-1].at + lines[-1].size if lines else taken.position
                if end == before and not anew:
                    return False
                taken = replace(taken, position=end, mark=mark_at(file, end))
        except OSError:
            if not anew:
                return False
            lines, taken = [], TakenIn(turn=taken.turn)
        self._write(name, lines, taken, anew=anew)
        return True

    def _before(self, name: str) -> bool:
        """Take in the lines before those that are in the index. Returns whether there were any."""
        with self.store.reading() as connection:
            taken = taken_in(connection, name)
        if not taken.begin:
            return False
        try:
            with (self.store.run / f"{name}.jsonl").open("rb") as file:
                lines = list(lines_before(file, taken.begin, PORTION_BYTES, short=True))
        except OSError:
            return False
        self._write(name, lines, replace(taken, begin=lines[0].at if lines else 0), anew=False)
        return True

    def _write(self, name: str, lines: Sequence[FoundLine], taken: TakenIn, *, anew: bool) -> None:
        writer, tables = WRITERS[name]
        skipped = taken.skipped + sum(line.record is None for line in lines)
        with self.store.writing() as connection:
            if anew:
                self.store.forget(connection, *tables)
            connection.execute(
                "REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)",
                (name, taken.begin, taken.position, taken.mark, skipped, taken.turn),
            )
            writer(connection, [line for line in lines if line.record is not None])


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (-1, 0)
    return found.st_size, found.st_mtime_ns


def taken_in(connection: sqlite3.Connection, name: str) -> TakenIn:
    """What of a file is in the index; nothing of one that was never looked at."""
    found = connection.execute(
        "SELECT begin, position, mark, skipped, turn FROM files WHERE name = ?", (name,)
    ).fetchone()
    return TakenIn(*found) if found else TakenIn()


def _portion_of(lines: Iterator[FoundLine]) -> Iterator[FoundLine]:
    taken = 0
    for line in islice(lines, PORTION):
        yield line
        taken += line.size
        if taken > PORTION_BYTES:
            return


def _metrics(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    """A program that counts its steps anew begins another loop."""
    last: dict[str, tuple[int, int]] = {}
    clock = connection.execute("SELECT coalesce(max(clock), 0) FROM lines").fetchone()[0]
    ids = {(p, n): id for id, p, n in connection.execute("SELECT id, program, name FROM names")}
    points: dict[int, tuple[array[int], array[float]]] = {}  # by metric: where its lines are, and its numbers
    for line in lines:
        record = line.record or {}
        program, step = _text(record.get("program")), _whole(record.get("step"))
        clock += _float(record.get("seconds")) or 0.0
        if program not in last:
            found = connection.execute(
                "SELECT loop, step FROM lines WHERE program = ? ORDER BY at DESC LIMIT 1", (program,)
            ).fetchone()
            last[program] = found or (1, -(1 << 62))
        loop, before = last[program]
        loop += step <= before
        last[program] = loop, step
        connection.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", (line.at, program, loop, step, clock))
        for name, value in record.items():
            number = _float(value)
            if name in ("program", "step") or number is None:
                continue
            id = ids.get((program, name))
            if id is None:
                ids[program, name] = id = _id_of(connection, program, storable(name))
            if id not in points:
                points[id] = array("q"), array("d")
            ats, numbers = points[id]
            ats.append(line.at)
            numbers.append(number)
    connection.executemany(
        "INSERT INTO points VALUES (?, ?, ?, ?, ?)",
        [(id, ats[-1], numbers[-1], ats.tobytes(), numbers.tobytes()) for id, (ats, numbers) in points.items()],
    )


def _id_of(connection: sqlite3.Connection, program: str, name: str) -> int:
    """The number of a metric, which it is given here where it has none."""
    connection.execute("INSERT OR IGNORE INTO names(program, name) VALUES (?, ?)", (program, name))
    return connection.execute("SELECT id FROM names WHERE program = ? AND name = ?", (program, name)).fetchone()[0]


def _timeline(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    bars = [bar for line in lines if line.record for bar in _bars(line.at, line.record)]
    connection.executemany(f"INSERT OR REPLACE INTO bars VALUES ({', '.join('?' * 17)})", bars)


def _bars(at: int, record: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The bar of a call, and those of its ranks."""
    where = _text(record.get("program")), _whole(record.get("step")), _text(record.get("node"))
    where = (*where, _text(record.get("pool")))
    call, piece = _whole(record.get("call", -1)), _whole(record.get("piece"))
    after = record.get("after")
    kind, before = after if isinstance(after, list) and len(after) == 2 else ("", None)
    why = _text(kind)[:20], before if isinstance(before, int) else None
    times = _float(record.get("start")) or 0.0, _float(record.get("end")) or 0.0
    size = _whole(record.get("rows")), _whole(record.get("tokens"))
    yield (
        at,
        -1,
        *where,
        *times,
        *size,
        call,
        piece,
        _float(record.get("issued")),
        _float(record.get("due")),
        *why,
        None,
    )
    ranks = record.get("ranks")
    for part in ranks if isinstance(ranks, list) else ():
        numbers = [_float(x) for x in part] if isinstance(part, list) and len(part) == 4 else []
        if numbers and None not in numbers:
            rank, start, ready, end = numbers
            yield (at, max(0, int(rank or 0)), *where, start, end, 0, 0, call, piece, None, None, "", None, ready)


def _memory(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    kinds = ("resident", "children", "device", "device_reserved", "device_peak")
    for line in lines:
        record = line.record or {}
        time, processes = _float(record.get("time")) or 0.0, record.get("processes")
        for process, found in processes.items() if isinstance(processes, dict) else ():
            known = found if isinstance(found, dict) else {}
            sizes = [_whole(known[kind]) or None if kind in known else None for kind in kinds]
            if sizes[0] is None:
                continue
            connection.execute(
                "INSERT INTO memory VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (line.at, storable(process)[:100], time, *sizes)
            )


def _traffic(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    for line in lines:
        record = line.record or {}
        program = _text(record.get("program"))
        sizes = [_total(record.get(what)) for what in ("reads", "makes", "weights")]
        connection.execute(
            "INSERT INTO traffic VALUES (?, ?, ?, ?, ?, ?)", (line.at, program, _whole(record.get("step")), *sizes)
        )
        lags = record.get("lags")
        for lag, groups in lags.items() if isinstance(lags, dict) else ():
            if str(lag).isdecimal():
                connection.execute("INSERT INTO lags VALUES (?, ?, ?, ?)", (line.at, program, int(lag), _whole(groups)))


def _ledger(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    for line in lines:
        record = dict(line.record or {})
        program, step = _text(record.pop("program", None)), _whole(record.pop("step", None))
        connection.execute("INSERT INTO ledger VALUES (?, ?, ?, ?)", (line.at, program, step, json.dumps(record)))


def _events(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    for line in lines:
        record = line.record or {}
        time, kind, text = _float(record.get("time")), _text(record.get("kind")), _text(record.get("text"))
        connection.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)", (line.at, time, kind[:100], text[:EVENT], line.size)
        )


def _trajectories(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> None:
    rows: list[tuple[Any, ...]] = []
    words: list[tuple[int, str]] = []
    prompts: dict[tuple[str, int, str], list[float]] = {}
    kinds = KindsOfRows(connection)
    for n, line in enumerate(lines, _first_number(connection, lines)):
        record = line.record or {}
        program, step = _text(record.get("program")), _whole(record.get("step"))
        key = record.get("key")
        prompt = storable(str(key[0]))[:200] if isinstance(key, list) and key else ""
        reward = reward_of(record)
        where = (program, step, prompt)
        rows.append(
            (
                n,
                *where,
                json.dumps(key)[:200],
                reward,
                _tokens(line),
                kinds.kind_of(program, record),
                line.at,
                line.size,
            )
        )
        words.append((n, storable("\n".join(searched_texts(record))[:SEARCHED])))
        found = prompts.setdefault(where, [0, 0.0, math.inf, -math.inf])
        found[0] += 1
        if reward is not None:
            found[1:] = found[1] + reward, min(found[2], reward), max(found[3], reward)
    kinds.write()
    connection.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    connection.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", words)
    connection.executemany(
        "INSERT INTO prompts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET rows = rows + excluded.rows, "
        "total = total + excluded.total, least = min(least, excluded.least), most = max(most, excluded.most)",
        [(*where, *found) for where, found in prompts.items()],
    )


def _first_number(connection: sqlite3.Connection, lines: Sequence[FoundLine]) -> int:
    """The number of the first of these rows: those before and after it have the numbers that come before and after.

    They begin in the middle, and above all that the file had before it was written anew: no number means two rows, and
    JavaScript has them as they are, below 2**53.
    """
    least, most = connection.execute("SELECT min(n), max(n) FROM rows").fetchone()
    if least is None:
        return (taken_in(connection, "trajectories").turn % TURNS << 32) + MIDDLE
    (at,) = connection.execute("SELECT at FROM rows WHERE n = ?", (least,)).fetchone()
    return least - len(lines) if lines and lines[0].at < at else most + 1


#: By file: what writes its lines, and the tables that they are in.
WRITERS: dict[str, tuple[Writer, Sequence[str]]] = {
    "metrics": (_metrics, ("lines", "points", "names")),
    "timeline": (_timeline, ("bars",)),
    "traffic": (_traffic, ("traffic", "lags")),
    "memory": (_memory, ("memory",)),
    "ledger": (_ledger, ("ledger",)),
    "events": (_events, ("events",)),
    "trajectories": (_trajectories, ("rows", "words", "prompts", "kinds", "no_labels")),
}


def reward_of(record: dict[str, Any]) -> float | None:
    """The reward of a row: a number, the last one of a list; None where it has none."""
    value = record.get("rewards", record.get("reward"))
    return _float(value[-1] if isinstance(value, list) and value else value)


def searched_texts(record: dict[str, Any]) -> Iterator[str]:
    """The texts of a row, and the contents of its messages."""
    for name, value in record.items():
        if type(value) is str:
            if name != "program":
                yield value
        elif type(value) is list and value and isinstance(value[0], dict):
            yield from (m["content"] for m in value if isinstance(m, dict) and isinstance(m.get("content"), str))


def _tokens(line: FoundLine) -> int:
    for name in ("response_ids", "tokens"):
        if name in line.lengths:
            return line.lengths[name]
        if line.record and isinstance(line.record.get(name), list):
            return len(line.record[name])
    return 0


def _text(value: Any) -> str:
    return storable(value if isinstance(value, str) else "" if value is None else str(value))


def storable(text: str) -> str:
    """A text without halves of surrogate pairs, which no database takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else 0


def _float(value: Any) -> float | None:
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _total(value: Any) -> int:
    """The sum of the numbers of a tree."""
    if isinstance(value, dict):
        return sum(map(_total, value.values()))
    return int(_float(value) or 0)
