"""Append-only files of JSON lines: a line is there whole or not at all, also when the disk is full."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ResumeError, shown
from .disk import BLOCK, replace_file, write_all, writing

_MARK = b',"crc":"'  # how the checksum of a line begins; it is the last entry of the line
TAIL = 2**22  # bytes: of a longer file the checksum is that of so many at its end, or up to twice as many


@dataclass
class TailChecksum:
    """The checksum of the end of a file, ``crc`` of all bytes from ``since`` on, as the file grows.

    It is that of the whole file where that is short. So what it costs to compare does not grow with the file.
    """

    since: int = 0
    crc: int = 0
    _next: int = 0  # where a later end begins, and the checksum of that
    _next_crc: int = 0

    @classmethod
    def read(cls, path: Path, size: int) -> TailChecksum:
        """Return that of the first ``size`` bytes of a file."""
        since = max(0, size - TAIL)
        return cls(since, part_checksum(path, since, size), size)

    def add(self, raw: bytes, size: int) -> None:
        """Count what was appended; the file is ``size`` bytes long with it."""
        self.crc, self._next_crc = zlib.crc32(raw, self.crc), zlib.crc32(raw, self._next_crc)
        if size - self._next >= TAIL:
            self.since, self.crc, self._next, self._next_crc = self._next, self._next_crc, size, 0


class Lines:
    """A file that lines are appended to. It is opened for the first of them; what was cut off of a last line goes then.

    ``size``: how long it is with whole lines alone. Raises ResumeError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn, self.size = _ends(path)  # bytes of a last line without its end, and of the lines before it
        self._tail = TailChecksum() if self.size == 0 else None  # None where nobody has computed it
        self._handle: int | None = None
        self._lock = threading.Lock()  # pools write from threads of their own

    def begin(self) -> None:
        """Make the file, before it has a line."""
        with self._lock, writing(self.path):
            self._opened()

    def append(self, text: str) -> tuple[int, int]:
        """Write a line. Returns the byte at which it begins, and how many it has. Raises DiskError, with the file as it
        was."""
        raw = (text + "\n").encode(errors="backslashreplace")  # half of a surrogate pair becomes its escape in JSON
        with self._lock, writing(self.path, len(raw)):
            handle = self._opened()
            try:
                write_all(handle, raw)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(handle, self.size)
                raise
            self.size += len(raw)
            if self._tail is not None:
                self._tail.add(raw, self.size)
            return self.size - len(raw), len(raw)

    def cut(self, size: int, tail: tuple[int, int] | None) -> None:
        """Have the file be its first ``size`` bytes, whose ``tail`` has this checksum from this byte on.

        It is done when the next line comes.
        """
        assert size <= self.size, "a file is not made longer by a cut"
        with self._lock:
            self._let_go()
            self.size, self._tail = size, None if tail is None else TailChecksum(*tail, size)

    def settle(self) -> None:
        """Do what waits for the next line: leave out what was cut off."""
        if self.torn or (self.path.exists() and self.path.stat().st_size != self.size):
            with self._lock, writing(self.path):
                self._opened()

    def keep_records(self) -> None:
        """Leave out lines that are no JSON records."""
        with self.path.open("rb") as file:
            kept = [raw for raw in file if _record(raw) is not None]
        with self._lock:
            self._let_go()
            replace_file(self.path, b"".join(kept))
            self.size, self._tail = sum(map(len, kept)), None

    def mark(self) -> tuple[int, tuple[int, int]]:
        """How long it is, and the byte from which on its tail has which checksum, as :meth:`cut` takes them. All are of
        one time. Lines that this process has not written are read once."""
        with self._lock:
            if self._tail is None:
                self._tail = TailChecksum.read(self.path, self.size)
            return self.size, (self._tail.since, self._tail.crc)

    def sync(self) -> None:
        """Have the disk hold all of it."""
        with self._lock, writing(self.path):
            if self._handle is not None:
                os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file; the next line opens it again."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            if os.fstat(self._handle).st_size != self.size:
                os.ftruncate(self._handle, self.size)
            self.torn = 0
        return self._handle


def _ends(path: Path) -> tuple[int, int]:
    """How many bytes of a file are a last line without its end, and how many come before."""
    try:
        with path.open("rb") as file:
            end = at = file.seek(0, os.SEEK_END)
            while at:
                start = max(0, at - BLOCK)
                file.seek(start)
                found = file.read(at - start).rfind(b"\n")
                if found >= 0:
                    return end - (start + found + 1), start + found + 1
                at = start
            return end, 0
    except FileNotFoundError:
        if path.is_symlink():
            raise unreadable(path, "it is a link to nothing") from None
        return 0, 0
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, why: OSError | str) -> ResumeError:
    """The error of a file that the run needs and that cannot be opened."""
    reason = why.strerror if isinstance(why, OSError) else why
    return ResumeError(
        f"{shown(str(path))} cannot be read: {reason}. Nothing was changed.",
        fix="Make it readable, or take it away, and go on with --resume.",
    )


def part_checksum(path: Path, since: int, until: int) -> int:
    """The CRC-32 of a file from one byte up to another. Raises ResumeError for one that cannot be read."""
    crc, left = 0, until - since
    try:
        with path.open("rb") as file:
            file.seek(since)
            while left > 0 and (block := file.read(min(BLOCK, left))):
                crc, left = zlib.crc32(block, crc), left - len(block)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error) from None
    return crc


# -- lines with a checksum each ---------------------------------------------------------------------------------------


def sealed(record: dict[str, Any]) -> str:
    """A record as a line that shows damage: ``{"read":3,"value":0.25,"crc":"9f2c01ab"}``."""
    body = json.dumps(record, separators=(",", ":"))
    return f'{body[:-1]}{_MARK.decode()}{zlib.crc32(body.encode()):08x}"}}'


@dataclass(frozen=True)
class Line:
    """A line as it was found: its number from 1 on, the byte at which it begins, how many it has, and its record, None
    where it is damaged."""

    number: int
    start: int
    size: int
    record: dict[str, Any] | None


def read_lines(path: Path) -> Iterator[Line]:
    """The whole lines of a file, without a last one that has no end; none where there is no file.

    A line without a checksum counts as whole where no line before it has one: an older flowrl wrote it.
    """
    sealed_before, start = False, 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    return
                has_seal, record = _opened_line(raw)
                sealed_before |= has_seal
                yield Line(number, start, len(raw), record if has_seal or not sealed_before else None)
                start += len(raw)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from None


def read_lines_at(path: Path, places: Sequence[tuple[int, int]]) -> list[dict[str, Any] | None]:
    """The records of lines that begin at these bytes and have so many; None for one that is damaged by now, or gone.

    Raises ResumeError for a file that cannot be read.
    """
    found: list[dict[str, Any] | None] = []
    try:
        with path.open("rb") as file:
            for start, size in places:
                file.seek(start)
                found.append(_opened_line(file.read(size))[1])
    except FileNotFoundError:
        return [None] * len(places)
    except OSError as error:
        raise unreadable(path, error) from None
    return found


def _opened_line(raw: bytes) -> tuple[bool, dict[str, Any] | None]:
    """Whether a line has a checksum, and its record, None where that is another one's."""
    body, mark, seal = raw.rstrip(b"\n").rpartition(_MARK)
    if not mark:
        return False, _record(raw)
    whole = seal == b'%08x"}' % zlib.crc32(body + b"}")
    return True, _record(body + b"}") if whole else None


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw.decode())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
