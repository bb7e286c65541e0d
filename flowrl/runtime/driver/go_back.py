"""Going back after a loss: what was lost is started again, and the run goes on from its last checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...errors import RankLost
from ..local.user_code_watch import name_rows
from ..storage.checkpoints.choose_checkpoint import load_answers, newest_whole
from ..storage.journal import Journal
from ..values.step_records import ResumePoint
from .progress import Progress
from .run_position import RunPosition
from .run_texts import describe_continuation
from .take_checkpoint import Checkpoints

LOSSES = 10  # of processes without a step in between: then something is wrong that starting again does not mend


class Losses:
    """The processes that a run has lost, and its way back from each loss."""

    def __init__(
        self, position: RunPosition, checkpoints: Checkpoints, progress: Progress, journal: Journal, out: Path
    ) -> None:
        self._position, self._checkpoints, self._progress = position, checkpoints, progress
        self._journal, self._out = journal, out
        self._in_a_row, self._fresh = 0, False  # and whether a step was done since the last

    def note_step(self) -> None:
        """A step was done: losses are counted anew."""
        self._fresh = True

    def note(self, lost: RankLost) -> None:
        """Write a loss down. Raises it when there were too many without a step in between."""
        name_rows(lost, self._out)
        self._position.recorder.event("lost", str(lost))
        self._progress.note(f"lost: {lost.what}")
        self._in_a_row, self._fresh = 1 if self._fresh else self._in_a_row + 1, False
        if self._in_a_row > LOSSES:
            raise lost

    def recover(self, lost: RankLost) -> tuple[int, ResumePoint | None]:
        """Start again what was lost, and go back to the last checkpoint: where to go on from. Raises what is past help.

        Steps after the checkpoint are done again with the same rows and seeds; what touched the world is answered from
        the journal.
        """
        self._checkpoints.wait_for_last()  # it may be the one to go back to
        while True:
            try:
                self.note(lost)
                self._position.executor.recover(lost)
                return self._go_back()
            except RankLost as again:
                if again is lost:
                    raise
                lost = again

    def _go_back(self) -> tuple[int, ResumePoint | None]:
        """Go back to the last checkpoint, or to the start: the program to go on with, and where in it."""
        position = self._position
        self._journal.forget()  # ranks have written too
        if position.chosen is not None:  # nothing was done since the run was resumed
            chosen = replace(position.chosen, said=())
        else:
            chosen = newest_whole(self._out, position.recorder.record, self._journal)
        load_answers(self._journal, chosen)
        position.restore_surroundings(chosen.manifest["stage"] if chosen.manifest else 0)
        if chosen.manifest is None:
            position.executor.reset()
        first, resume = position.go_on(chosen)
        where = describe_continuation(position.executions, chosen.manifest)
        position.recorder.event("recovered", where)
        self._progress.note(f"went on {where}")
        return first, resume
