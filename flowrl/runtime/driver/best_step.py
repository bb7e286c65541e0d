"""Which checkpoint is the best one, by a number that the program logs: ``accuracy``, or ``loss:min``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SMALLEST = ":min"


class Score:
    """The number by which checkpoints are compared: ``Score("accuracy")``; with an empty name none is.

    A checkpoint counts with the last number that was logged since the one before it, so that no number of older
    weights is taken for that of newer ones.
    """

    def __init__(self, metric: str) -> None:
        self.name, self._sign = metric.removesuffix(SMALLEST), -1.0 if metric.endswith(SMALLEST) else 1.0
        self._last: dict[str, Any] | None = None  # what the next checkpoint counts with

    def note(self, line: Mapping[str, Any]) -> None:
        """Look at a line of metrics that was logged."""
        value = line.get(self.name) if self.name else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            where = {"metric": self.name, "value": value, "program": line["program"], "step": line["step"]}
            self._last = {**where, "score": self._sign * value}

    def take(self) -> dict[str, Any] | None:
        """Return what a manifest says of a checkpoint that is taken now; None where it is not compared."""
        last, self._last = self._last, None
        return last

    def rewind(self) -> None:
        """Go back to a checkpoint: no number was logged since."""
        self._last = None
