"""The journal of a rank: one file, that the calls which run beside each other on the rank share."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from ...storage.journal import Journal


class RankJournal:
    """The journal that a rank writes at ``path``, opened by the first call that asks for it.

    There is one :class:`Journal` as long as the process lives, also over :meth:`forget`: two of them would each take
    the lines that the other has written for the end of a line that was cut off, and drop them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._is_read = False

    def get(self, since: Mapping[str, int]) -> Journal:
        """Return the journal. It knows what all ranks of the run have written from these parts on."""
        with self._lock:
            if self._journal is None:
                self._journal = Journal(self._path, beside="journal*.jsonl", since=None)
            if not self._is_read:
                self._journal.forget()
                self._journal.load(since)
                self._is_read = True
            return self._journal

    def forget(self) -> None:
        """Have the next call read the files again, and let go of the file. A call that still runs goes on writing."""
        with self._lock:
            self._is_read = False
            if self._journal is not None:
                self._journal.close()

    def sync(self) -> None:
        """Have the disk hold it."""
        with self._lock:
            if self._journal is not None:
                self._journal.sync()
