"""New whole lines of a file that grows, from where the last look ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from .store import checksum

LONGEST_LINE = 64 << 20  # bytes; a longer one is left out
MARK = 4096  # bytes before a position that are compared
LONG_LIST = 64  # bytes from which on a list of numbers is only counted
NUMBERS = b"0123456789+-.eE, truefalsnNIity"  # what stands in a list of numbers or of true and false
READ = (b"rewards", b"reward", b"key")  # lists that are read, however long


@dataclass(frozen=True)
class FoundLine:
    """A line, where it begins, and its record: None where it is no JSON object, or too long.

    ``lengths`` are those of long lists of numbers that were counted and left out of the record, where it was asked for.
    """

    at: int
    size: int
    record: dict[str, Any] | None
    lengths: Mapping[str, int] = field(default_factory=dict)


def is_as_it_was(path: Path, position: int, mark: int) -> bool:
    """Whether a file still has the same bytes before a position, as far as its last ones tell."""
    try:
        with path.open("rb") as file:
            return mark_at(file, position) == mark
    except OSError:
        return position == 0


def mark_at(file: BinaryIO, position: int) -> int:
    """The checksum of the bytes before a position; 0 at the start, -1 where the file is shorter."""
    if position == 0:
        return 0
    file.seek(max(0, position - MARK))
    raw = file.read(min(MARK, position))
    return checksum(raw) if len(raw) == min(MARK, position) else -1


def new_lines(file: BinaryIO, position: int, *, short: bool = False) -> Iterator[FoundLine]:
    """The lines from a position on. A last one without its end is left for the next look.

    ``short``: of long lists of numbers only the lengths are wanted, which takes half the time.
    """
    file.seek(position)
    while raw := file.readline(LONGEST_LINE):
        if raw.endswith(b"\n"):
            kept, lengths = count_long_lists(raw) if short else (raw, {})
            yield FoundLine(position, len(raw), _record(kept), lengths)
            position += len(raw)
            continue
        size = len(raw)
        while (more := file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
            size += len(more)
        if not more:
            return
        yield FoundLine(position, size + len(more), None)
        position += size + len(more)


def last_end(file: BinaryIO) -> int:
    """Where the last whole line of a file ends."""
    at = file.seek(0, 2)
    while at:
        begin = max(0, at - (1 << 16))
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


def lines_before(file: BinaryIO, end: int, most: int, *, short: bool = False) -> Iterator[FoundLine]:
    """The lines that end at a place, of about ``most`` bytes, at least one; ``end`` is where a line begins."""
    begin = max(0, end - most)
    if begin:
        file.seek(begin - 1)
        while (raw := file.readline(LONGEST_LINE)) and not raw.endswith(b"\n"):
            pass
        begin = file.tell()
        if begin >= end:  # they are all of one line
            yield from lines_before(file, end, 2 * most, short=short)
            return
    for line in new_lines(file, begin, short=short):
        if line.at >= end:
            return
        yield line


def count_long_lists(raw: bytes) -> tuple[bytes, dict[str, int]]:
    """A JSON object as bytes with its long lists of numbers empty, and their lengths by name.

    Within a text a quote has a backslash before it, so ``": [`` begins a list, unless a backslash is before it.

    >>> count_long_lists(b'{"step": 3, "ids": [' + b"7, " * 30 + b'7], "text": "ids\\\\": [8]"}')
    (b'{"step": 3, "ids": [], "text": "ids\\\\": [8]"}', {'ids': 31})
    """
    parts: list[bytes] = []
    lengths: dict[str, int] = {}
    done = at = 0
    while (at := raw.find(b'": [', at)) >= 0:
        begin = at + 4
        end = raw.find(b"]", begin)
        name = raw[raw.rfind(b'"', 0, at) + 1 : at]
        if end - begin > LONG_LIST and name not in READ and raw[at - 1] != 92:
            body = raw[begin:end]
            if not body.translate(None, NUMBERS):
                parts.append(raw[done:begin])
                lengths[name.decode(errors="replace")] = body.count(b",") + 1
                done = begin = end
        at = begin
    return b"".join([*parts, raw[done:]]), lengths


def read_line(path: Path, at: int, size: int) -> dict[str, Any] | None:
    """The record at a place of a file; None where there is none any more."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return _record(file.read(min(size, LONGEST_LINE)))
    except OSError:
        return None


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
