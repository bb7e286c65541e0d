"""Rows that failed in the calls of a program: all those of a call are looked at together, once it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...batch import CallInfo
from ...workers.user_code.failed_rewards import Failures, settle
from ..values.call import Call
from .journal import Journal


class FailedRows:
    """Keeps what chunks and processes tell of the rows that failed, until all of a call is there."""

    def __init__(self, journal: Journal | None = None, warn: Callable[[str], None] = lambda text: None) -> None:
        self._journal, self._warn = journal, warn
        self._parts: dict[CallInfo, list[Failures]] = {}
        self._lock = threading.Lock()

    def note(self, found: Failures) -> None:
        """Keep what failed in a part of a call."""
        with self._lock:
            self._parts.setdefault(found.call, []).append(found)

    def settle(self, call: Call, rows: int) -> None:
        """Take a call that is done, and has so many rows, with those that failed: a warning, or RewardError."""
        with self._lock:
            parts = self._parts.pop(call.info, [])
        if parts:
            settle(parts, rows, self._warn)
            if self._journal is not None:
                self._journal.take(*call.place, call.info)

    def reset(self) -> None:
        """Forget calls that have not come to their end."""
        with self._lock:
            self._parts.clear()
