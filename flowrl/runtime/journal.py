"""What a run must remember line by line: the values that its program read, and what touched the world."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..batch import Batch, Key


class Journal:
    """An append-only file of JSON lines, ``journal.jsonl``. A line that was cut off by a crash is dropped.

    ``{"program": 0, "read": 3, "value": 0.25}``: the program's fourth read gave 0.25.
    ``{"program": 0, "call": 17, "op": "reward.score", "keys": [[0, 0], ...], "inputs": ["9f...", ...], "fields": {...},
    "adds": {...}}``: what the external call 17, one of this op, added to these rows, of which it had read that
    (:mod:`flowrl.runtime.external`); ``value`` in place of ``adds`` where it gives no rows. A call has a line for each
    time that some of its rows were asked for.

    ``beside``: a pattern of the journals that others write in the same folder; they are read too.
    """

    def __init__(self, path: Path, *, beside: str = "") -> None:
        self.path = path
        self.reads: dict[tuple[int, int], Any] = {}
        self._external: dict[tuple[int, int], list[dict[str, Any]]] = {}  # by program and call
        others = sorted(p for p in path.parent.glob(beside) if p != path) if beside else []
        for line in (*(line for other in others for line in _whole_lines(other)), *lines(path)):
            if "read" in line:
                self.reads[(line["program"], line["read"])] = line["value"]
            else:
                self._external.setdefault((line["program"], line["call"]), []).append(_with_keys(line))
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._kept: list[list[tuple[int, int]]] = [[], []]  # before the last sync, and since then

    def read(self, program: int, number: int, value: Any) -> None:
        """Keep the value of a read."""
        self.reads[(program, number)] = value
        self._write({"program": program, "read": number, "value": value})

    def keep(
        self,
        program: int,
        call: int,
        keys: Sequence[Key],
        inputs: Sequence[str],
        fields: Mapping[str, Sequence[str]],
        *,
        op: str,
        adds: Batch | None = None,
        value: Any = None,
    ) -> None:
        """Keep what an external call gave for some rows: also here, until the sync after the next."""
        given = {"value": value} if adds is None else {"adds": adds.to_record()}
        line = {
            "program": program,
            "call": call,
            "op": op,
            "keys": keys,
            "inputs": inputs,
            "fields": fields,
            **given,
        }
        self._write(line)
        with self._lock:
            self._external.setdefault((program, call), []).append(_with_keys(line))
            self._kept[1].append((program, call))

    def answers(self, program: int, call: int) -> list[dict[str, Any]]:
        """What an external call gave before: lines as they are written, with keys as tuples; the newest first."""
        with self._lock:
            return self._external.get((program, call), [])[::-1]

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        with self._lock:  # pools write from threads of their own
            self._file.write(text)
            self._file.flush()

    def sync(self) -> None:
        """Have the disk hold all of it. Calls from before the last sync are not made again."""
        with self._lock:
            for key in self._kept.pop(0):
                self._external.pop(key, None)
            self._kept.append([])
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _with_keys(line: dict[str, Any]) -> dict[str, Any]:
    """A line with keys as batches have them."""
    return {**line, "keys": tuple(tuple(key) for key in line["keys"])} if "keys" in line else line


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; a last line without its end is dropped from the file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            whole += len(raw)
            yield json.loads(raw)
        file.truncate(whole)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that somebody else may be writing."""
    with path.open("rb") as file:
        yield from (json.loads(raw) for raw in file if raw.endswith(b"\n"))
