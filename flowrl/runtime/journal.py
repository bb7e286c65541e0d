"""What a run must remember line by line: the values that its program read, and what touched the world."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..batch import Batch


class Journal:
    """An append-only file of JSON lines, ``journal.jsonl``. A line that was cut off by a crash is dropped.

    ``{"program": 0, "read": 3, "value": 0.25}``: the program's fourth read gave 0.25.
    ``{"program": 0, "call": 17, "inputs": "9f...", "adds": {...}}``: what the external call 17 added.

    ``beside``: a pattern of the journals that others write in the same folder; they are read too.
    """

    def __init__(self, path: Path, *, beside: str = "") -> None:
        self.path = path
        self.reads: dict[tuple[int, int], Any] = {}
        self.external: dict[tuple[int, int, int], dict[str, Any]] = {}  # program, call, piece
        others = sorted(p for p in path.parent.glob(beside) if p != path) if beside else []
        for line in (*(line for other in others for line in _whole_lines(other)), *lines(path)):
            if "read" in line:
                self.reads[(line["program"], line["read"])] = line["value"]
            else:
                self.external[(line["program"], line["call"], line.get("piece", 0))] = line
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._kept: list[list[tuple[int, int, int]]] = [[], []]  # before the last sync, and since then

    def read(self, program: int, number: int, value: Any) -> None:
        """Keep the value of a read."""
        self.reads[(program, number)] = value
        self._write({"program": program, "read": number, "value": value})

    def keep(self, program: int, call: int, piece: int, inputs: str, added: Batch) -> None:
        """Keep what an external call, or a piece of it, added to its rows: also here, until the sync after the next."""
        line = {"program": program, "call": call, "piece": piece, "inputs": inputs, "adds": added.to_record()}
        self._write(line)
        self.external[program, call, piece] = line
        self._kept[1].append((program, call, piece))

    def kept(self, program: int, call: int, piece: int, inputs: str, differs: Callable[[], None]) -> Batch | None:
        """What the call added before, when it was made with the same inputs; ``differs`` is told when not."""
        line = self.external.get((program, call, piece))
        if line is None:
            return None
        if line["inputs"] != inputs:
            differs()
            return None
        return Batch.from_record(line["adds"])

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        with self._lock:  # pools write from threads of their own
            self._file.write(text)
            self._file.flush()

    def sync(self) -> None:
        """Have the disk hold all of it. Calls from before the last sync are not made again."""
        for key in self._kept.pop(0):
            self.external.pop(key, None)
        self._kept.append([])
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


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
