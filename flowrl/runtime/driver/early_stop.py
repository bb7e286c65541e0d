"""When the steps of a loop are enough: a number that the program logs has not improved for so long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .best_step import Metric


class EarlyStop:
    """Looks at the lines of metrics for a number: ``EarlyStop("accuracy:3")``, ``EarlyStop("loss:min:3")``.

    Once so many of them in a row are not better than the best one before, it is enough; one that is not finite is not.
    When a step is opened, it goes by the steps that are surely recorded by then, which are all but the last
    ``staleness``: timing decides nothing.
    """

    def __init__(self, said: str, staleness: int = 0) -> None:
        name, _, patience = said.rpartition(":")
        self.metric, self._patience = Metric(name), int(patience or 0)
        self._staleness = staleness
        self._state: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """A loop begins: it is judged by itself."""
        self._state = {"best": None, "at": None, "since": 0, "enough": None}

    def note(self, line: Mapping[str, Any], done: int) -> None:
        """Look at a line of metrics, of a time when so many steps were ``done``."""
        value = self.metric.of(line)
        state = self._state
        if value is None or state["enough"] is not None:
            return
        best = state["best"]
        if math.isfinite(value) and (best is None or self.metric.sign * (value - best) > 0):
            state |= {"best": value, "at": line["step"], "since": 0}
            return
        state["since"] += 1
        if state["since"] >= self._patience:
            state["enough"] = done

    def note_settled(self, line: Mapping[str, Any], done: int) -> None:
        """The same, at a time when everything so far is recorded."""
        self.note(line, done - self._staleness)

    def is_enough(self, opened: int) -> bool:
        """Whether no step is to be opened after so many."""
        enough = self._state["enough"]
        return enough is not None and enough <= opened - self._staleness

    def in_words(self) -> str:
        """Return why it is enough."""
        best, at = self._state["best"], self._state["at"]
        if best is None:
            return f"{self.metric.name} was no finite number {self._state['since']} times"
        better = "below" if self.metric.sign < 0 else "above"
        since = "since" if self._patience == 1 else f"in the {self._patience} numbers since"
        return f"{self.metric.name} has not been {better} {best:.4g}, that of step {at}, {since}"

    def state(self) -> dict[str, Any]:
        """Return what was seen so far, as JSON, for :meth:`restore`."""
        return dict(self._state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have seen what :meth:`state` has returned, and nothing else."""
        self._state = {**self._state, **state}
