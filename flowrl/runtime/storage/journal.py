"""What a run must remember line by line: the values that its program read, and what touched the world."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...batch import Batch, CallInfo, Key
from .jsonl import Lines, read_lines, sealed


class Journal:
    """An append-only file of JSON lines, ``journal.jsonl``, with a checksum each (:mod:`flowrl.runtime.storage.jsonl`).

    A last line that was cut off by a crash is dropped when the next one is written. A damaged line is left as it is and
    counts for nothing. ``damage`` has a text for each of both: what it is, and what that means.

    ``{"program": 0, "read": 3, "value": 0.25}``: the program's fourth read gave 0.25.
    ``{"program": 0, "call": 17, "op": "reward.score", "outside": false, "keys": [[0, 0], ...],
    "inputs": ["9f...", ...], "fields": {...}, "adds": {...}}``: what the external call 17, one of this op in a step
    (``outside``: between steps), added to these rows, of which it had read that
    (:mod:`flowrl.runtime.storage.answers.external_answers`); ``value`` in place of ``adds`` where it gives no rows.
    A call has a line for each time that some of its rows were asked for, or have answered. ``keys`` may be those of
    rows that it has made of its rows, with the ``inputs`` of these.
    ``{..., "failed": true}``: these rows have failed. They count as long as the call was taken with them:
    ``{"program": 0, "call": 17, "op": "reward.score", "outside": false, "taken": true}``.

    ``beside``: a pattern of the journals that others write in the same folder; they are read too. Raises ResumeError
    for a file that cannot be read.
    """

    def __init__(self, path: Path, *, beside: str = "") -> None:
        self.path = path
        self.reads: dict[tuple[int, int], Any] = {}
        self.damage: list[str] = []
        self._external: dict[tuple[int, int], list[dict[str, Any]]] = {}  # by program and call
        self._taken: set[tuple[Any, ...]] = set()  # calls that are done, and may have failed rows
        self._lines = Lines(path)
        for other in sorted(p for p in path.parent.glob(beside) if p != path) if beside else []:
            self._take(other, Lines(other).torn)
        self._take(path, self._lines.torn)
        self._lock = threading.Lock()
        self._kept: list[list[tuple[int, int]]] = [[], []]  # before the last sync, and since then

    def _take(self, path: Path, torn: int) -> None:
        """Know what a file of lines holds; ``torn`` bytes at its end are no whole line."""
        damaged: list[int] = []
        for number, line in ((line.number, line.record) for line in read_lines(path)):
            if line is None or not ({"program", "read", "value"} <= set(line) or {"program", "call"} <= set(line)):
                damaged.append(number)
            elif "read" in line:
                self.reads[(line["program"], line["read"])] = line["value"]
            elif "taken" in line:
                self._taken.add(_call_of(line))
            else:
                self._external.setdefault((line["program"], line["call"]), []).append(_with_keys(line))
        if damaged:
            which, are = (f"line {damaged[0]}", "is") if len(damaged) == 1 else (f"{len(damaged)} lines", "are")
            first = "" if len(damaged) == 1 else f" (the first is line {damaged[0]})"
            self.damage.append(
                f"{which} of {path.name} {are} damaged{first}: rows whose answers were there are asked again where the "
                "run needs them"
            )
        if torn:
            self.damage.append(
                f"{path.name} ends in the middle of a line: its last {torn} bytes are cut off, and what they held is "
                "asked again where the run needs it"
            )

    def begin(self) -> None:
        """Make the file of a new run."""
        self._lines.begin()

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
        of: CallInfo,
        adds: Batch | None = None,
        value: Any = None,
        failed: bool = False,
    ) -> None:
        """Keep what an external call gave for some rows: also here, until the sync after the next.

        ``failed``: these rows have failed, and have their answer once the call is taken.
        """
        given = {"value": value} if adds is None else {"adds": adds.to_record()}
        line = {
            "program": program,
            "call": call,
            "op": of.op,
            "outside": of.outside,
            "keys": keys,
            "inputs": inputs,
            "fields": fields,
            **given,
            **({"failed": True} if failed else {}),
        }
        self._write(line)
        with self._lock:
            self._external.setdefault((program, call), []).append(_with_keys(line))
            self._kept[1].append((program, call))

    def take(self, program: int, call: int, of: CallInfo) -> None:
        """Take a call with the rows of it that have failed: these are answers from here on."""
        line = {"program": program, "call": call, "op": of.op, "outside": of.outside, "taken": True}
        with self._lock:
            if _call_of(line) in self._taken:
                return
            self._taken.add(_call_of(line))
        self._write(line)

    def answers(self, program: int, call: int) -> list[dict[str, Any]]:
        """What an external call gave before: lines as they are written, with keys as tuples; the newest first."""
        with self._lock:
            lines = self._external.get((program, call), [])[::-1]
            return [line for line in lines if not line.get("failed") or _call_of(line) in self._taken]

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.append(sealed(line))

    def sync(self) -> None:
        """Have the disk hold all of it. Calls from before the last sync are not made again."""
        with self._lock:
            for key in self._kept.pop(0):
                self._external.pop(key, None)
            self._kept.append([])
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def _call_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which call a line is of."""
    return line["program"], line["call"], line.get("op"), line.get("outside")


def _with_keys(line: dict[str, Any]) -> dict[str, Any]:
    """A line with keys as batches have them."""
    return {**line, "keys": tuple(tuple(key) for key in line["keys"])} if "keys" in line else line
