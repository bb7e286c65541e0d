"""New whole lines of a file that grows, from where the last look ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .store import checksum

LONGEST_LINE = 64 << 20  # bytes; a longer one is left out
MARK = 4096  # bytes before a position that are compared


@dataclass(frozen=True)
class FoundLine:
    """A line, where it begins, and its record: None where it is no JSON object, or too long."""

    at: int
    size: int
    record: dict[str, Any] | None


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


def new_lines(file: BinaryIO, position: int) -> Iterator[FoundLine]:
    """The lines from a position on. A last one without its end is left for the next look."""
    file.seek(position)
    while raw := file.readline(LONGEST_LINE):
        if raw.endswith(b"\n"):
            yield FoundLine(position, len(raw), _record(raw))
            position += len(raw)
            continue
        size = len(raw)
        while (more := file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
            size += len(more)
        if not more:
            return
        yield FoundLine(position, size + len(more), None)
        position += size + len(more)


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
