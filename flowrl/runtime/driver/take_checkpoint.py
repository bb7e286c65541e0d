"""A checkpoint of a run is taken: all that the rest of it depends on, copied at once and written meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import RankLost
from ..executor import Executor, open_copies
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.background_writer import CheckpointWriter
from ..storage.disk import size
from ..storage.recorder import Recorder
from ..values.step_records import Point
from .metric_watches import MetricWatches
from .run_position import RunPosition
from .run_settings import Settings


class Checkpoints:
    """The checkpoints of a run. ``check`` raises where the folder is not this run's any more.

    ``asked`` is what a resumed run was asked, while no checkpoint of it has said so in the run's record.
    """

    def __init__(
        self,
        settings: Settings,
        executor: Executor,
        recorder: Recorder,
        position: RunPosition,
        watches: MetricWatches,
        *,
        check: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._settings, self._executor, self._recorder = settings, executor, recorder
        self._position, self._watches, self._check, self._warn = position, watches, check, warn
        self._folder = settings.out / "checkpoints"
        self._writer = CheckpointWriter(self._folder, check, keep=settings.keep_last, best=bool(settings.keep_best))
        self._waits = False  # whether it was told that there is no memory to write them in the background
        self.overdue = False  # one was lost with a rank that was writing it, or the gap alarm asks for one
        self.asked: dict[str, Any] = {}
        self.none = False  # nobody goes on from this run: it takes none
        self.wait, self.give_up = self._writer.wait, self._writer.give_up

    def is_due(self, step: int) -> bool:
        """Whether one is to be taken after this step."""
        return self.overdue or (step + 1) % self._settings.checkpoint_every == 0

    def take(self, point: Point) -> None:
        """Keep all that the rest of the run depends on, in one piece: copied here, and written meanwhile.

        Where the newest checkpoint has the same state, as at the end of a loop whose last step had one, only what else
        is known by now is written into it.
        """
        if self.none:
            return
        self._check()
        self.wait_for_last()
        self._sync()
        calls, reads = (point.record["calls"], point.record["reads"]) if point.record is not None else (0, 0)
        manifest = {
            **self._position.record(point.marks, calls, reads),
            "program": point.record,
            "inputs": self._settings.inputs.record,
            "seed": self._settings.seed,
            "run": self._recorder.record.get("id"),
            "record": {**self._recorder.record, **self.asked, "checkpoints": True},
        }
        if (score := self._watches.score.take()) is not None:
            manifest["best"] = score
        if not self.overdue and self._is_written_again(manifest, point):
            return self._note_written()

        def capture(after: int) -> checkpoint.Begun:
            return self._executor.capture(self._folder, manifest, point.live, after=after)

        if self._watches.health.gap_alarm.rang and point.record is not None:
            self._recorder.keep_rows(point.record["steps"])
        lacking = self._writer.begin(capture, self._note_written)
        self.overdue = False
        if lacking and not self._waits:
            self._waits = True
            self._warn(
                f"steps wait until checkpoints are written: a copy of the state lacks {size(lacking)} of host memory"
            )

    def _is_written_again(self, manifest: Mapping[str, Any], point: Point) -> bool:
        """Whether the newest checkpoint has this state, and now also says what this manifest says."""
        keep, best = self._settings.keep_last, bool(self._settings.keep_best)
        workers = open_copies(self._executor)
        return checkpoint.write_again(self._folder, manifest, workers, point.live, keep=keep, keep_best=best)

    def _sync(self) -> None:
        """Have the disk hold what a checkpoint marks: steps before it are not done again."""
        self._recorder.sync()
        self._executor.sync()

    def end_program(self) -> None:
        """The last checkpoint is that of the end of a loop: mark in it that the program has ended."""
        if self.none:
            return
        self._sync()
        self.wait()
        checkpoint.end(self._folder, self._position.record(self._position.marks()))

    def wait_for_last(self) -> None:
        """Return when none is being written, as :meth:`look` looks after it."""
        self._look_after(self._writer.wait)

    def look(self) -> None:
        """Raise what has kept a checkpoint from being written. One that a rank was lost in is taken again."""
        self._look_after(self._writer.check)

    def _look_after(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except RankLost as lost:
            self.overdue = True
            self._recorder.event("checkpoint", f"one was not finished, and is taken again after this step: {lost.what}")

    def _note_written(self) -> None:
        """A checkpoint is there. What a resumed run was asked holds from here on, also when it is resumed again."""
        if self.asked or not self._recorder.record.get("checkpoints"):
            self._recorder.run_record(**self.asked, checkpoints=True)
            self.asked = {}
