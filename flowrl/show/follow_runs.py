"""A thread that keeps the indexes of all runs up to their files, as long as the page is served."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import FlowError
from ..runtime.storage.run_record import read_record
from .find_runs import FoundRun, find_runs
from .index_run import WRITERS, Indexer, taken_in
from .store import Store

PAUSE = 1.0  # seconds between two looks at files of which nothing was new
SCAN = 10.0  # seconds between two looks for new runs


class FollowedRun:
    """A run with its index and its record."""

    def __init__(self, found: FoundRun, cache: Path) -> None:
        self.found, self.store = found, Store(found.folder, found.id, cache)
        self.store.close()  # a look takes it and gives it back: there may be more runs than files that can be open
        self.indexer = Indexer(self.store)
        self.busy = True  # whether the last look at its trajectories found something new
        self.problem = ""  # why its index is not kept up
        self._record: tuple[tuple[int, int], dict[str, Any], str] | None = None
        self._reading = threading.Lock()

    def record(self) -> tuple[dict[str, Any], str]:
        """What run.json holds, and what is to be said of it. A file that cannot be read is an empty record."""
        with self._reading:
            try:
                stat = (self.found.folder / "run.json").stat()
                seen = (stat.st_mtime_ns, stat.st_size)
            except OSError:
                seen = (0, 0)
            if self._record is None or self._record[0] != seen:
                try:
                    self._record = (seen, *read_record(self.found.folder))
                except FlowError as error:
                    self._record = (seen, {}, str(error).splitlines()[0])
            return self._record[1], self._record[2]

    def progress(self) -> dict[str, Any]:
        """How much of the run's files is in the index: ``share`` of the bytes, and a number that grows with them.

        ``rows`` is the share of the trajectories alone.
        """
        with self.store.reading() as connection:
            taken = {name: taken_in(connection, name) for name in WRITERS}
        sizes = {name: _size(self.found.folder / f"{name}.jsonl") for name in WRITERS}
        done = {name: min(each.position - each.begin, sizes[name]) for name, each in taken.items()}
        rows = sizes["trajectories"]
        share = sum(done.values()) / max(1, sum(sizes.values())) if self.busy else 1.0
        return {
            "share": share if sum(sizes.values()) else 1.0,  # what is left is a last line without its end
            "rows": done["trajectories"] / rows if rows and self.busy else 1.0,
            "revision": sum(each.position - each.begin for each in taken.values())
            + (self._record[0][0] if self._record else 0),
            "skipped": {name: each.skipped for name, each in taken.items() if each.skipped},
        }


class Follower(threading.Thread):
    """Follows the runs below some folders until it is stopped."""

    def __init__(self, folders: Sequence[Path], cache: Path) -> None:
        super().__init__(name="flowrl show", daemon=True)
        self.folders, self.cache = folders, cache
        self.runs = {found.id: FollowedRun(found, cache) for found in find_runs(folders)}
        self.first = ""  # the run whose rows somebody looks at
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look again and again."""
        scanned = time.monotonic()
        while not self._stopped.is_set():
            if not self.look():
                self._stopped.wait(PAUSE)
            if time.monotonic() - scanned > SCAN:
                self.find_new()
                scanned = time.monotonic()

    def look(self) -> bool:
        """Take in what is new: all that is small, then a portion of one run's trajectories. Returns whether any was."""
        runs = list(self.runs.values())
        small = [self._try(run, "small") for run in runs]
        if any(small):
            return True
        for run in sorted(runs, key=lambda run: run.found.id != self.first):
            run.busy = self._try(run, "trajectories")
            if run.busy:
                return True
        return False

    def find_new(self) -> None:
        """Follow the runs that have begun since the last look."""
        try:
            found = find_runs(self.folders)
        except FlowError:
            return
        for run in found:
            if run.id not in self.runs:
                with suppress(OSError, sqlite3.Error):  # such as a full disk: the next look for new runs tries again
                    self.runs = {**self.runs, run.id: FollowedRun(run, self.cache)}

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self.is_alive():
            self.join()

    def _try(self, run: FollowedRun, what: str) -> bool:
        try:
            new = run.store.writes and getattr(run.indexer, what)()
        except (OSError, sqlite3.Error) as error:  # a disk that is full; the page says so and shows what there is
            run.problem = f"the index cannot be written: {error}"
            return False
        finally:
            run.store.close()
        run.problem = "" if new else run.problem
        return new


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
