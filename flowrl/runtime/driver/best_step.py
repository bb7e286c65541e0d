"""Which checkpoint is the best one, by a number that the program logs: ``accuracy``, or ``loss:min``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SMALLEST = ":min"


class Metric:
    """A number of the lines of metrics by its name, and whether the largest or the smallest one is the best.

    Where several programs log a number of that name, ``evaluate/accuracy`` says whose it is.

    >>> Metric("loss:min").of({"program": "grpo", "step": 3, "loss": 0.25}), Metric("loss:min").sign
    (0.25, -1.0)
    >>> Metric("evaluate/accuracy").of({"program": "evaluate", "step": 20, "accuracy": 0.5})
    0.5
    """

    def __init__(self, said: str) -> None:
        self.name, self.sign = said.removesuffix(SMALLEST), -1.0 if said.endswith(SMALLEST) else 1.0
        self.seen = not self.name  # in some line

    def of(self, line: Mapping[str, Any]) -> float | None:
        """Return the number that a line has; None where it has none."""
        if not self.name:
            return None
        value = line.get(self.name, line.get(self.name.removeprefix(f"{line['program']}/")))
        if not isinstance(value, (int, float)):
            return None
        self.seen = True
        return value


class Score:
    """The number by which checkpoints are compared: ``Score("accuracy")``; with an empty name none is.

    A checkpoint counts with the last number that was logged since the one before it, so that no number of older
    weights is taken for that of newer ones.
    """

    def __init__(self, metric: str) -> None:
        self.metric = Metric(metric)
        self._last: dict[str, Any] | None = None  # what the next checkpoint counts with

    def note(self, line: Mapping[str, Any]) -> None:
        """Look at a line of metrics that was logged."""
        value = self.metric.of(line)
        if value is not None and math.isfinite(value):
            where = {"metric": self.metric.name, "value": value, "program": line["program"], "step": line["step"]}
            self._last = {**where, "score": self.metric.sign * value}

    def take(self) -> dict[str, Any] | None:
        """Return what a manifest says of a checkpoint that is taken now; None where it is not compared."""
        last, self._last = self._last, None
        return last

    def rewind(self) -> None:
        """Go back to a checkpoint: no number was logged since."""
        self._last = None
