"""The index of a run: an sqlite file in the user's cache, made of the run's files and thrown away at will."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VERSION = 4  # of the tables below; an index of another one is made anew

#: ``at`` is where a line begins in its file, so lines are in the order in which they were written. ``points`` has what
#: a portion of the lines says of a metric: where these lines are (``ats``, i64), their ``numbers`` (f64), and the last
#: of both. ``bars`` has a call as that of rank -1, and the part of each rank beside it; ``kind`` and ``after`` say what
#: let it begin. Rows are numbered in the order of their lines; their ``kind`` says which labels they have.
_TABLES = """
CREATE TABLE files(name TEXT PRIMARY KEY, begin INTEGER, position INTEGER, mark INTEGER, skipped INTEGER,
    turn INTEGER);
CREATE TABLE lines(at INTEGER PRIMARY KEY, program TEXT, loop INTEGER, step INTEGER, clock REAL);
CREATE TABLE names(id INTEGER PRIMARY KEY, program TEXT, name TEXT, UNIQUE(program, name));
CREATE TABLE points(name INTEGER, last_at INTEGER, last REAL, ats BLOB, numbers BLOB);
CREATE INDEX points_by_name ON points(name, last_at);
CREATE TABLE bars(at INTEGER, rank INTEGER, program TEXT, step INTEGER, node TEXT, pool TEXT, start REAL, end REAL,
    rows INTEGER, tokens INTEGER, call INTEGER, piece INTEGER, issued REAL, due REAL, kind TEXT, after INTEGER,
    ready REAL, PRIMARY KEY(at, rank)) WITHOUT ROWID;
CREATE INDEX bars_by_start ON bars(start);
CREATE INDEX bars_by_call ON bars(program, call, rank);
CREATE INDEX bars_by_step ON bars(program, step);
CREATE TABLE memory(at INTEGER, process TEXT, time REAL, resident INTEGER, children INTEGER, device INTEGER,
    device_reserved INTEGER, device_peak INTEGER);
CREATE INDEX memory_by_time ON memory(time);
CREATE TABLE traffic(at INTEGER PRIMARY KEY, program TEXT, step INTEGER, read INTEGER, made INTEGER, weights INTEGER);
CREATE TABLE lags(at INTEGER, program TEXT, lag INTEGER, groups INTEGER);
CREATE TABLE ledger(at INTEGER PRIMARY KEY, program TEXT, step INTEGER, what TEXT);
CREATE TABLE events(at INTEGER PRIMARY KEY, time REAL, kind TEXT, text TEXT, size INTEGER);
CREATE TABLE rows(n INTEGER PRIMARY KEY, program TEXT, step INTEGER, prompt TEXT, key TEXT, reward REAL,
    tokens INTEGER, kind INTEGER, at INTEGER, size INTEGER);
CREATE INDEX rows_by_step ON rows(program, step, prompt);
CREATE INDEX rows_by_reward ON rows(program, reward);
CREATE INDEX rows_by_tokens ON rows(program, tokens);
CREATE INDEX rows_by_kind ON rows(kind);
CREATE TABLE kinds(id INTEGER PRIMARY KEY, program TEXT, labels TEXT, rows INTEGER, UNIQUE(program, labels));
CREATE TABLE no_labels(program TEXT, name TEXT, PRIMARY KEY(program, name)) WITHOUT ROWID;
CREATE TABLE prompts(program TEXT, step INTEGER, prompt TEXT, rows INTEGER, total REAL, least REAL, most REAL,
    PRIMARY KEY(program, step, prompt)) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0);
INSERT INTO words(words, rank) VALUES('hashsize', 16777216);
"""


class Store:
    """The index of one run. One process at a time writes it; others read what it has written."""

    def __init__(self, run: Path, id: str, cache: Path) -> None:
        self.run = run
        self.path = cache / f"{id}.v{VERSION}.sqlite"
        self.made = 0  # how often this process has made it anew
        self._damaged = False
        self._lock = _take_lock(self.path.with_suffix(".lock"))
        if self._lock is not None:
            if not self._is_ours():
                self._make()
            _remove_older(id, cache)

    @property
    def writes(self) -> bool:
        """Whether this process may write the index, until it closes it; False while another one does.

        An index that was found damaged, or was deleted, is made anew.
        """
        if self._lock is None:
            self._lock = _take_lock(self.path.with_suffix(".lock"))
        if self._lock is not None and (self._damaged or not self.path.exists() or not self.path.stat().st_size):
            self._make()
        return self._lock is not None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for one question: what is written meanwhile is not seen."""
        with self._connected() as connection:
            connection.execute("PRAGMA query_only = 1")
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are there together when the block ends, or not at all."""
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    def forget(self, connection: sqlite3.Connection, *tables: str) -> None:
        """Empty tables, of which the file was written anew."""
        for table in tables:
            text = "INSERT INTO words(words) VALUES ('delete-all')" if table == "words" else f"DELETE FROM {table}"
            connection.execute(text)

    def close(self) -> None:
        """Let another process write the index."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that is closed when the block ends. Damage that shows in it is kept in mind."""
        connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = OFF")  # what a power cut damages is made anew
            connection.execute("PRAGMA cache_size = -32000")
            connection.execute("PRAGMA temp_store = MEMORY")
            yield connection
        except sqlite3.DatabaseError as error:
            self._damaged = self._damaged or _shows_damage(error)
            raise
        finally:
            connection.close()

    def _make(self) -> None:
        """Make the tables in a new file; one that is damaged or of another kind is thrown away."""
        self._damaged = True  # until all is there: a disk may be full
        _remove(self.path)
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        self._damaged = False
        self.made += 1

    def _is_ours(self) -> bool:
        """Whether the head of the file is that of our tables. Damage behind it shows when it is read."""
        try:
            with self.reading() as connection:
                return connection.execute("PRAGMA user_version").fetchone()[0] == VERSION
        except sqlite3.DatabaseError:
            return False


def open_cache() -> Path:
    """The folder of all indexes, for this user alone; one that goes with the process where the cache cannot be used.

    Indexes of runs that are gone stay until the user clears the cache, as every cache does.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "flowrl" / "show"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="flowrl-show-"))


def checksum(raw: bytes) -> int:
    """63 bits of the bytes before a position, by which it is seen whether a file was written anew."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1


def _remove_older(id: str, cache: Path) -> None:
    """Remove indexes of the same run that an older flowrl has made, and that no process keeps up to date."""
    for version in range(1, VERSION):
        path = cache / f"{id}.v{version}.sqlite"
        if path.exists() and (lock := _take_lock(path.with_suffix(".lock"))) is not None:
            _remove(path)
            path.with_suffix(".lock").unlink(missing_ok=True)
            os.close(lock)


def _shows_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether an error is of the file, and not of a full disk or of a question."""
    code = getattr(error, "sqlite_errorcode", 0)  # what Python itself raises has none
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _take_lock(path: Path) -> int | None:
    """A lock on the index that ends with this process; None while another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    os.close(handle)
    return None
