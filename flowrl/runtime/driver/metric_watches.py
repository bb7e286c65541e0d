"""What looks at the lines of metrics of a run: its health, when to stop, which step is the best, and trackers.

All of it goes back where the run goes back to a checkpoint: what is done again is seen once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...trackers.tracking import Tracking
from ..storage.recorder import Recorder
from ..values.step_records import Step
from .best_step import Score
from .early_stop import EarlyStop
from .monitoring.health import Health
from .monitoring.learning_stalled import stalled
from .notices import Notices
from .run_settings import Settings
from .run_texts import unseen_metric


class MetricWatches:
    """``MetricWatches(settings, recorder, notices, staleness)``; ``tracking`` is there once the run has begun."""

    tracking: Tracking

    def __init__(self, settings: Settings, recorder: Recorder, notices: Notices, staleness: int) -> None:
        self.score = Score(settings.keep_best)
        self.early = EarlyStop(settings.stop_when, staleness)
        self.health = Health()
        self._recorder, self._notices = recorder, notices
        self._unseen: set[str] = set()  # options whose metric is told to be in no line

    def state(self) -> dict[str, Any]:
        """Return what was seen so far, as JSON, for :meth:`rewind`."""
        return {"health": self.health.state(), "tracking": self.tracking.state(), "stop": self.early.state()}

    def rewind(self, seen: Mapping[str, Any] | None) -> None:
        """Go back to where this was seen; None: to where those lines end that are left."""
        if seen is not None:
            self.tracking.restore(seen["tracking"])
            self.health.restore(seen["health"])
            self.early.restore(seen.get("stop", {}))
        else:
            self.early.begin()
            self.tracking.rewind(self._recorder.metrics())
            self.health.rewind(self._recorder.metrics())
        self.score.rewind()

    def look(self, label: str, lines: Sequence[Mapping[str, Any]], step: Step) -> bool:
        """Look at the lines of a step, tell what is worth telling; return whether the gap alarm begins to ring."""
        for line in lines:
            self.score.note(line)
            self.early.note(line, step.number + 1)
        rang = self.health.gap_alarm.rang
        for kind, text in self.health.look(label, lines[-1], step, self._recorder.latest[label]):
            self._notices.tell(kind, text)
        return self.health.gap_alarm.rang and not rang

    def look_at_evaluation(self, line: Mapping[str, Any], done: int) -> None:
        """Look at the line of an evaluation after so many steps."""
        self.score.note(line)
        self.early.note_settled(line, done)
        self._tell_unseen()

    def end_program(self, label: str) -> None:
        """Tell what can be told of a program that has ended."""
        if (text := stalled(self._recorder.latest[label], ended=True)) is not None:
            self._notices.warn(f"{label}: {text}")
        self._tell_unseen()

    def is_enough(self, label: str, opened: int) -> bool:
        """Whether a loop ends after so many steps, as it does not get better."""
        enough = self.early.is_enough(opened)
        if enough:
            text = f"{label} after {opened} steps: {self.early.in_words()}"
            self._notices.tell("stopped early", text, f"stopped early: {text}")
        return enough

    def _tell_unseen(self) -> None:
        """Warn of a metric that a run is to go by, and that no line has."""
        lines = [line for some in self._recorder.latest.values() for line in some]
        for option, metric in (("keep-best", self.score.metric), ("stop-when", self.early.metric)):
            text = unseen_metric(option, metric, lines)
            if text is not None and option not in self._unseen:
                self._unseen.add(option)
                self._notices.warn(text)
