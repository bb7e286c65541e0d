"""Writes the checkpoints of a run in a thread of their own, one at a time, while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..disk import remove
from . import checkpoint_folder as checkpoint


class _GivenUp(Exception):
    """Nobody waits for the checkpoint any more."""


class CheckpointWriter:
    """The checkpoints of a folder. At most one is being written: who begins another one waits for it.

    ``check`` raises where the folder is not this run's any more; it is asked before a checkpoint counts. What went
    wrong in the thread is raised once, by whoever asks next.
    """

    def __init__(
        self, folder: Path, check: Callable[[], None] = lambda: None, *, keep: int = checkpoint.KEEP, best: bool = False
    ) -> None:
        self.folder, self._check, self._keep, self._best = folder, check, keep, best
        self._number, self._part = -1, folder  # of the last one that was begun
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._gave_up = False
        self._committing = threading.Lock()

    def begin(self, capture: Callable[[int], checkpoint.Begun], written: Callable[[], None] = lambda: None) -> int:
        """Take a checkpoint. ``capture`` copies what goes into it, and is given the number of the last one.

        ``written`` is called when it counts. Returns the bytes of memory that a copy lacks: where there are any, it has
        been written by now, else that goes on in the thread.
        """
        self.wait()
        begun = replace(capture(self._number), keep=self._keep, keep_best=self._best)
        self._number, self._part = begun.number, begun.part
        lacking = max((c.lacking for c in begun.captured), default=0)
        self._thread = threading.Thread(
            target=self._write, args=(begun, written), daemon=True, name="flowrl-checkpoint"
        )
        self._thread.start()
        if lacking:
            self.wait()
        return lacking

    def check(self) -> None:
        """Raise what has kept a checkpoint from being written, if that is known by now."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written. Raises what has kept it from being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self) -> None:
        """Leave a checkpoint that is being written unfinished; it takes no room any more."""
        with self._committing:
            self._gave_up = True
        if self._thread is not None and self._thread.is_alive():
            remove(self._part)

    def _write(self, begun: checkpoint.Begun, written: Callable[[], None]) -> None:
        try:
            checkpoint.write(begun, self._commit)
            written()
        except BaseException as error:
            self._error = error

    def _commit(self, do: Callable[[], None]) -> None:
        self._check()
        with self._committing:
            if self._gave_up:
                raise _GivenUp("the run has been stopped")
            do()
