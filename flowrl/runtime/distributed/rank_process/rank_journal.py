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
        self._since: dict[str, int] | None = None  # the parts from which on it was read; None while it was not
        self._epoch = 0  # in which it was read

    def get(self, since: Mapping[str, int], epoch: int = 0) -> Journal:
        """Return the journal. It knows what all ranks of the run had written from these parts on, as this epoch began.

        A call that was made before the last checkpoint, and is made again, needs earlier parts than others do. One of
        a later epoch may have rows of a rank that is gone, which has answered some of them.
        """
        with self._lock:
            if self._journal is None:
                self._journal = Journal(self._path, beside="journal*.jsonl", since=None)
            read = self._since if epoch <= self._epoch else None
            self._epoch = max(epoch, self._epoch)
            if read is None or any(first > since.get(base, 0) for base, first in read.items()):
                earliest = since if read is None else {b: min(first, since.get(b, 0)) for b, first in read.items()}
                self._journal.forget()
                self._journal.load(earliest)
                self._since = dict(earliest)
            return self._journal

    def forget(self) -> None:
        """Have the next call read the files again, and let go of the file. A call that still runs goes on writing."""
        with self._lock:
            self._since = None
            if self._journal is not None:
                self._journal.close()

    def sync(self) -> None:
        """Have the disk hold it."""
        with self._lock:
            if self._journal is not None:
                self._journal.sync()
