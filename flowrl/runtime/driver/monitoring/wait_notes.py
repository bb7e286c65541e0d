"""What a run waits for, written to a file while it takes long: ``flowrl doctor`` tells it, also of a dead run."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...storage.disk import replace_file
from ...storage.wait_record import NAME

LONG = 5.0  # seconds without an event of the schedule after which the waits are written down
LOOK = 2.0  # seconds between two looks


class WaitNotes:
    """Looks at a run from a thread of its own. ``waits`` gives what it waits for now, and how long nothing happened.

    ``script``: where the driver is in it is noted too. Nothing is written while calls follow each other.
    """

    def __init__(self, folder: Path, script: str, waits: Callable[[], tuple[Mapping[str, Any], float]]) -> None:
        self._file, self._script, self._waits = folder / NAME, script, waits
        self._driver = threading.get_ident()
        self._written = False
        self._end = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look inside the block. What is there when it ends in an error stays; else there is nothing to tell."""
        with suppress(OSError):  # that of a process before
            self._file.unlink(missing_ok=True)
        thread = threading.Thread(target=self._look_on, daemon=True, name="flowrl-waits")
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def look(self) -> None:
        """Write down what the run waits for, where that takes long; take it away where it goes on."""
        if self._waits()[1] >= LONG:
            self.write()
        elif self._written:
            self._file.unlink(missing_ok=True)
            self._written = False

    def write(self) -> None:
        """Write down what the run waits for now."""
        waits, quiet = self._waits()
        line = {"time": time.time(), "quiet": quiet, "driver": self._place(), **waits}
        with self._lock:
            replace_file(self._file, json.dumps(line))
        self._written = True

    def _look_on(self) -> None:
        while not self._end.wait(LOOK):
            with suppress(Exception):  # a run does not fail for want of notes
                self.look()

    def _place(self) -> str:
        """The line of the script that the driver's thread is at: ``grpo.py:31``; empty where it is not in it."""
        frame = sys._current_frames().get(self._driver)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code.co_filename != self._script:
            frame = frame.f_back
        return f"{Path(self._script).name}:{frame.f_lineno}" if frame is not None else ""
