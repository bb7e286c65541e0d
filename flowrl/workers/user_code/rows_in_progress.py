"""Which rows user code works on: a file that outlives its process, read when user code hangs or its process dies."""

from __future__ import annotations

import heapq
import inspect
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ...batch import Key
from ...errors import shown
from ..headway import make_headway

NAME = "user_code"  # user_code.jsonl of the driver, user_code.POOL.RANK.jsonl of a rank
DIED, FORKED = f"{NAME}_died.jsonl", f"{NAME}_forked.jsonl"
DEATHS = 3  # of a process at a row; that row is not asked for again
_LINE = 1024  # bytes of a line: each is written in its place at once
_PROMPT = 60  # characters of a prompt that are told


@dataclass(frozen=True)
class Row:
    """One row that user code is at.

    ``Row("grpo", 3, "reward.score", (17, 2), "exact, rewards.py:12", "12+7=", since=1764000000.0)``. ``rows`` is how
    many it was given at once, from this one on. ``timeout``: seconds after which nobody waits for it any more; None
    where its worker waits for ever.
    """

    program: str = ""
    step: int = 0
    op: str = ""
    key: Key = ()
    code: str = ""
    prompt: str = ""
    rows: int = 1
    since: float = 0.0
    timeout: float | None = None

    def __str__(self) -> str:
        if not self.key:
            return f"{self.op} of step {self.step}: {self.code}"
        which = f"row {named_row(self.key)}" if self.rows == 1 else f"{self.rows} rows from {named_row(self.key)} on"
        prompt = f" (prompt {self.prompt!a})" if self.prompt else ""
        return f"{self.op} of step {self.step} at {which}{prompt}: {self.code}"

    @property
    def id(self) -> tuple[Any, ...]:
        """What tells it from other rows of the run."""
        return self.program, self.step, self.op, self.key


def named_row(key: Key) -> str:
    """A row in a message: ``3``, or ``3, sample 2`` for one of several of a prompt."""
    return f"{key[0]}" + "".join(f", sample {k}" for k in key[1:2]) + "".join(f".{k}" for k in key[2:])


def code_of(fn: Callable[..., Any]) -> str:
    """A function by its name, file and line: ``exact, rewards.py:12``."""
    found = inspect.unwrap(fn)
    while isinstance(found, partial):
        found = found.func
    code: Any = getattr(getattr(found, "__func__", found), "__code__", None)
    code = code or getattr(getattr(type(found), "__call__", None), "__code__", None)  # noqa: B004
    name = getattr(found, "__name__", type(found).__name__)
    return f"{name}, {shown(code.co_filename)}:{code.co_firstlineno}" if code is not None else name


class Notes:
    """The rows that user code of this process is at. ``Notes()`` keeps none; with a folder it writes them to a file.

    Rows at which processes have died before are asked for one at a time, so that a process that dies again says which
    one it is; the third time it is not asked for.
    """

    def __init__(self, folder: Path | None = None, name: str = NAME) -> None:
        self.folder = folder
        self._file = -1
        if folder is not None:
            with suppress(OSError):  # a run does not fail for want of notes: a folder that is gone, a full disk
                self._file = os.open(folder / f"{name}.jsonl", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                self._close = weakref.finalize(self, os.close, self._file)
        self._free: list[int] = []
        self._places: dict[int, int] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._deaths = deaths(folder) if folder is not None else Counter()

    def begin(self, row: Row) -> int:
        """User code begins with a row. Returns what ends the note; 0 where none is kept."""
        make_headway()
        if self._file < 0:
            return 0
        line = _written(row, time.time())
        with self._lock:
            self._count += 1
            place = heapq.heappop(self._free) if self._free else len(self._places)
            self._places[self._count] = place
            with suppress(OSError):
                os.pwrite(self._file, line, place * _LINE)
            return self._count

    def end(self, number: int) -> None:
        """User code is done with a row, or nobody waits for it any more."""
        make_headway()
        if not number:
            return
        with self._lock:
            place = self._places.pop(number, None)
            if place is None:
                return
            with suppress(OSError):
                os.pwrite(self._file, b" " * (_LINE - 1) + b"\n", place * _LINE)
            heapq.heappush(self._free, place)

    def count_deaths(self, row: Row) -> int:
        """How many processes have died at a row."""
        return self._deaths[row.id] if self._deaths else 0

    def end_fork(self, row: Row) -> None:
        """End this process, which user code has forked off, and which came back as if it were the one before."""
        text = f"{row} has forked, and its child came back from there; the child was ended. End it with os._exit()."
        try:
            os.write(2, f"flowrl: {text}\n".encode(errors="backslashreplace"))
            if self.folder is not None:
                _append(self.folder / FORKED, {"text": text})
        finally:
            os._exit(1)

    def close(self) -> None:
        """Let go of the file. Code that nobody waits for may end later, when its number is another file's."""
        with self._lock:
            if self._file >= 0:
                self._close()
                self._file = -1


def at_work(folder: Path, name: str = f"{NAME}*") -> list[Row]:
    """The rows that user code of all processes of a run is at, as far as can be read; the oldest first."""
    found: list[Row] = []
    for file in folder.glob(f"{name}.jsonl"):
        if file.name not in (DIED, FORKED):
            found += [_read(line) for line in lines_of(file)]
    return sorted(found, key=lambda row: row.since)


def bury(folder: Path, name: str, *, driver: bool = False) -> list[Row]:
    """The rows at which a process has died, written down so that they are asked for with care; its notes go.

    ``driver``: it was that of the run, which may have been ended for other reasons: its rows are never given up.
    """
    rows = at_work(folder, name)
    for row in rows:
        _append(folder / DIED, {**asdict(row), "alone": len(rows) == 1 and not driver})
    for file in folder.glob(f"{name}.jsonl"):
        if file.name not in (DIED, FORKED):
            file.unlink(missing_ok=True)
    return rows


def deaths(folder: Path) -> Counter[tuple[Any, ...]]:
    """How many processes have died at each row. One that was asked for among others counts at most once less than
    makes it given up: it may have been another one's fault."""
    total: Counter[tuple[Any, ...]] = Counter()
    alone: set[tuple[Any, ...]] = set()
    for line in lines_of(folder / DIED):
        row = _read(line)
        total[row.id] += 1
        alone |= {row.id} if line.get("alone") else set()
    return Counter({id: count if id in alone else min(count, DEATHS - 1) for id, count in total.items()})


def _written(row: Row, since: float) -> bytes:
    """The line of a row, JSON. It is made for every row, so what all rows of a call have is made once."""
    before, code = _of_all_rows(row.program, row.step, row.op[:80], row.code[-160:])
    prompt, timeout = json.dumps(row.prompt[:_PROMPT]), json.dumps(row.timeout)
    after = f'"rows": {row.rows}, "since": {since!r}, "timeout": {timeout}}}'
    line = f'{before}{list(row.key)}, "code": {code}, "prompt": {prompt}, {after}'
    if len(line) >= _LINE:
        code = json.dumps(row.code[-40:])
        line = f'{before}{list(row.key)}, "code": {code}, "prompt": "", {after}'
    return line.encode()[: _LINE - 1].ljust(_LINE - 1) + b"\n"


@lru_cache(maxsize=8)
def _of_all_rows(program: str, step: int, op: str, code: str) -> tuple[str, str]:
    """What lines of rows begin with, and their code, as JSON."""
    return json.dumps({"program": program, "step": step, "op": op})[:-1] + ', "key": ', json.dumps(code)


def _read(line: dict[str, Any]) -> Row:
    known = {name: line[name] for name in Row.__dataclass_fields__ if name in line}
    return Row(**{**known, "key": tuple(known.get("key", ()))})


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines that can be read; one that is being written, or that a full disk has cut off, cannot."""
    found: list[dict[str, Any]] = []
    try:
        said = file.read_bytes().splitlines()
    except OSError:
        return found
    for line in said:
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _append(file: Path, line: dict[str, Any]) -> None:
    with suppress(OSError), file.open("ab") as out:
        out.write(json.dumps(line).encode() + b"\n")


def told(rows: Sequence[Row]) -> str:
    """Rows at which a process has died, in a message."""
    if not rows:
        return ""
    more = f", and {len(rows) - 1} more: {', '.join(named_row(r.key) for r in rows[1:8])}" if len(rows) > 1 else ""
    return f"{rows[0]}{more}"
