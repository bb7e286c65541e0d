"""What a run must remember line by line: the values that its program read, and what touched the world."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ...batch import Batch, CallInfo, Key
from .jsonl import Lines, read_lines, read_lines_at, sealed

PART = 8 * 2**20  # bytes: a file of so many is not written to again, and the next one begins
_ASKED_AGAIN = "rows whose answers were there are asked again where the run needs them"
_NAME = re.compile(r"(.+?)(?:\.(\d{6}))?\.jsonl")


@dataclass
class _Furthest:
    """How far a part goes: the last call that it has a line of, and the last read."""

    call: tuple[int, float] = (-1, -1)
    read: tuple[int, int] = (-1, -1)

    def add(self, line: Mapping[str, Any]) -> None:
        if "read" in line:
            self.read = max(self.read, (line["program"], line["read"]))
        else:
            self.call = max(self.call, (line["program"], line["call"]))


class _Place(NamedTuple):
    """Where a line lies, and from which to which prompt its rows are: ``_Place(path, 4096, 512, 0, 15)``."""

    path: Path
    start: int  # bytes
    size: int
    first: float
    last: float

    def may_answer(self, first: float, last: float) -> bool:
        """Whether its rows may be of one of these prompts."""
        return self.first <= last and first <= self.last


class Journal:
    """An append-only file of JSON lines, ``journal.jsonl``, with a checksum each (:mod:`flowrl.runtime.storage.jsonl`).

    When it has 8 MiB, ``journal.000001.jsonl`` goes on, and so on: these are its parts. They only grow, and keep their
    names, so that a kill at any time leaves what was written. ``since`` says from which part on they are read, for the
    journal and each one beside it: ``{"journal": 3}``, as :meth:`parts` has given it for a checkpoint; by itself all
    are, and with None none is until :meth:`load`.

    Answers may be long and many, and most are never asked for: they stay in the files, and what is known here is where
    each line lies.

    A last line that was cut off by a crash is dropped when the next one is written. A damaged line is left as it is and
    counts for nothing. ``damage`` has a text for each of both: what it is, and what that means.

    ``{"program": 0, "read": 3, "value": 0.25}``: the program's fourth read gave 0.25.
    ``{"program": 0, "call": 17, "op": "reward.score", "outside": false, "keys": [[0, 0], ...],
    "inputs": ["9f...", ...], "fields": {...}, "adds": {...}}``: what the external call 17, one of this op in a step
    (``outside``: between steps), added to these rows, of which it had read that
    (:mod:`flowrl.runtime.storage.answers.external_answers`); ``value`` in place of ``adds`` where it gives no rows.
    The calls of an evaluation between steps have numbers between those of the calls before and after it.
    A call has a line for each time that some of its rows were asked for, or have answered. ``keys`` may be those of
    rows that it has made of its rows, with the ``inputs`` of these.
    ``{..., "failed": true}``: these rows have failed. They count as long as the call was taken with them:
    ``{"program": 0, "call": 17, "op": "reward.score", "outside": false, "taken": true}``.

    ``beside``: a pattern of the journals that others write in the same folder; they are read too. Raises ResumeError
    for a file that cannot be read.
    """

    def __init__(self, path: Path, *, beside: str = "", since: Mapping[str, int] | None = {}) -> None:
        self.path, self._beside, self._base = path, beside, _part_of(path)[0]
        self.damage: list[str] = []
        self._lock = threading.RLock()
        self._reads: dict[tuple[int, int], Any] = {}
        self._external: dict[tuple[int, float], list[_Place]] = {}  # by program and call
        self._taken: set[tuple[Any, ...]] = set()  # calls that are done, and may have failed rows
        self._furthest: dict[tuple[str, int], _Furthest] = {}  # of the parts that are known, by journal and number
        self._since: Mapping[str, int] | None = None  # what is known of the files, as long as they are as they were
        self._left_out = False  # parts of this journal
        self._kept: list[list[tuple[int, float]]] = [[], []]  # calls before the last sync, and since then
        self._read: list[list[tuple[int, int]]] = [[], []]  # the same of reads
        self._number = max(self._files().get(self._base, {0: path}))
        self._lines = Lines(self._part(self._number))
        if since is not None:
            self.load(since)

    def _part(self, number: int) -> Path:
        return self.path if not number else self.path.with_name(f"{self._base}.{number:06d}.jsonl")

    def _files(self) -> dict[str, dict[int, Path]]:
        """The parts that are there, by journal and number; those of this one come last."""
        found: dict[str, dict[int, Path]] = defaultdict(dict)
        for path in sorted(self.path.parent.glob("*.jsonl")):
            base, number = _part_of(path)
            if base == self._base or fnmatchcase(path.name, self._beside):
                found[base][number] = path
        mine = found.pop(self._base, None)
        return {**found, **({self._base: mine} if mine else {})}

    # -- reading ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Have the next :meth:`load` read the files again: others may have written meanwhile."""
        with self._lock:
            self._since = None

    def load(self, since: Mapping[str, int]) -> None:
        """Know what the parts hold, from these on."""
        with self._lock:
            if self._since == since:
                return
            files = self._files()
            self.damage, self._reads, self._external, self._taken = [], {}, {}, set()
            self._furthest, self._since, self._left_out = {}, dict(since), False
            self._kept, self._read = [[], []], [[], []]
            for base, parts in files.items():
                first = since.get(base, 0)
                self._left_out |= base == self._base and first > 0
                for number in range(first, max(parts) + 1):
                    if number in parts:
                        self._take(parts[number], (base, number))
                    else:
                        gone = f"{base}.{number:06d}.jsonl" if number else f"{base}.jsonl"
                        self.damage.append(f"{gone} is missing: {_ASKED_AGAIN}")

    def _take(self, path: Path, part: tuple[str, int]) -> None:
        """Know what a file of lines holds."""
        torn = Lines(path).torn  # bytes at its end that are no whole line
        damaged: list[int] = []
        furthest = self._furthest.setdefault(part, _Furthest())
        for found in read_lines(path):
            line = found.record
            if line is None or not ({"program", "read", "value"} <= set(line) or {"program", "call"} <= set(line)):
                damaged.append(found.number)
                continue
            furthest.add(line)
            if "read" in line:
                self._reads[(line["program"], line["read"])] = line["value"]
            elif "taken" in line:
                self._taken.add(_call_of(line))
            else:
                self._note(line, path, found.start, found.size)
        if damaged:
            which, are = (f"line {damaged[0]}", "is") if len(damaged) == 1 else (f"{len(damaged)} lines", "are")
            first = "" if len(damaged) == 1 else f" (the first is line {damaged[0]})"
            self.damage.append(f"{which} of {path.name} {are} damaged{first}: {_ASKED_AGAIN}")
        if torn:
            self.damage.append(
                f"{path.name} ends in the middle of a line: its last {torn} bytes are cut off, and what they held is "
                "asked again where the run needs it"
            )

    def _note(self, line: Mapping[str, Any], path: Path, start: int, size: int) -> None:
        """Know where the answers of a line lie."""
        place = _Place(path, start, size, *_prompts_of(line.get("keys", ())))
        self._external.setdefault((line["program"], line["call"]), []).append(place)

    def value(self, program: int, number: int) -> Any:
        """The value of a read. Raises KeyError where it is lost. Parts that were left out are read for it."""
        key = (program, number)
        if key not in self._reads and (self._left_out or self._since is None):
            self.load({})
        return self._reads[key]

    def lost(self, program: int, reads: int) -> list[int]:
        """Which of so many reads of a program are lost; of parts that were left out nothing is said."""
        mine = [number for of, number in self._reads if of == program]
        first = min(mine, default=reads) if self._left_out else 0
        return [number for number in range(first, reads) if (program, number) not in self._reads]

    def parts(self, program: int, calls: int, reads: int) -> dict[str, int]:
        """From which part on a run needs each journal that goes on after so many calls and reads of this program."""
        with self._lock:
            found: dict[str, int] = {}
            for base, parts in self._files().items():
                ahead = [
                    number
                    for (of, number), furthest in self._furthest.items()
                    if of == base and (furthest.call >= (program, calls) or furthest.read >= (program, reads))
                ]
                found[base] = min([max(parts), *ahead])
            return found

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the file of a new run."""
        self._lines.begin()

    def read(self, program: int, number: int, value: Any) -> None:
        """Keep the value of a read."""
        self._write({"program": program, "read": number, "value": value})
        with self._lock:
            self._reads[(program, number)] = value
            self._read[1].append((program, number))

    def keep(
        self,
        program: int,
        call: float,
        keys: Sequence[Key],
        inputs: Sequence[str],
        fields: Mapping[str, Sequence[str]],
        *,
        of: CallInfo,
        adds: Batch | None = None,
        value: Any = None,
        failed: bool = False,
    ) -> None:
        """Keep what an external call gave for some rows. It can be asked for until the sync after the next, and where
        the files are read again.

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
        with self._lock:
            start, size = self._write(line)
            self._note(line, self._lines.path, start, size)
            self._kept[1].append((program, call))

    def take(self, program: int, call: float, of: CallInfo) -> None:
        """Take a call with the rows of it that have failed: these are answers from here on."""
        line = {"program": program, "call": call, "op": of.op, "outside": of.outside, "taken": True}
        with self._lock:
            if _call_of(line) in self._taken:
                return
            self._taken.add(_call_of(line))
        self._write(line)

    def answers(self, program: int, call: float, keys: Collection[Key] = ()) -> list[dict[str, Any]]:
        """What an external call gave before: lines as they are written, with keys as tuples; the newest first.

        ``keys``: the rows that are asked for; a line that has none of them, nor of rows made of them, may be left out,
        as other chunks of a call write them. One that is damaged by now is left out too.
        """
        first, last = _prompts_of(keys)
        with self._lock:
            places = [place for place in self._external.get((program, call), [])[::-1] if place.may_answer(first, last)]
        found: list[dict[str, Any]] = []
        for path, some in groupby(places, key=lambda place: place.path):
            lines = read_lines_at(path, [(place.start, place.size) for place in some])
            found += [_with_keys(line) for line in lines if line is not None]
        with self._lock:
            return [line for line in found if not line.get("failed") or _call_of(line) in self._taken]

    def _write(self, line: dict[str, Any]) -> tuple[int, int]:
        """Write a line: the byte of its part at which it begins, and how many it has."""
        text = sealed(line)
        with self._lock:
            if self._lines.size >= PART:
                self._begin_part()
            self._furthest.setdefault((self._base, self._number), _Furthest()).add(line)
            self._since = None
            return self._lines.append(text)

    def _begin_part(self) -> None:
        """Go on in a new file; the one before is whole and on the disk by then."""
        self._lines.settle()
        self._lines.sync()
        self._lines.close()
        self._number += 1
        self._lines = Lines(self._part(self._number))

    def sync(self) -> None:
        """Have the disk hold all of it. What was kept before the last sync is not asked for any more."""
        with self._lock:
            for key in self._kept.pop(0):
                self._external.pop(key, None)
            for key in self._read.pop(0):
                self._reads.pop(key, None)
            self._kept.append([])
            self._read.append([])
            self._since = None
            self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def _part_of(path: Path) -> tuple[str, int]:
    """The journal that a file is of, and its number there: ``("journal", 3)`` of ``journal.000003.jsonl``."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, f"{path.name} is a journal"
    return found[1], int(found[2] or 0)


def _call_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which call a line is of."""
    return line["program"], line["call"], line.get("op"), line.get("outside")


def _prompts_of(keys: Collection[Sequence[int]]) -> tuple[float, float]:
    """The first and the last prompt of rows; without rows it may be any."""
    return (min(key[0] for key in keys), max(key[0] for key in keys)) if keys else (-inf, inf)


def _with_keys(line: dict[str, Any]) -> dict[str, Any]:
    """A line with keys as batches have them."""
    return {**line, "keys": tuple(tuple(key) for key in line["keys"])} if "keys" in line else line
