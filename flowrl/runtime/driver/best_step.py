"""Which checkpoint is the best one, by a number that the program logs: ``accuracy``, or ``loss:min``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SMALLEST = ":min"


class Score:
    """The number by which checkpoints are compared: ``Score("accuracy")``; with an empty name none is.

    A checkpoint counts with the last number that was logged since the one before it, so that no number of older
    weights is taken for that of newer ones.
    """

    def __init__(self, metric: str) -> None:
        self.name, self._sign = metric.removesuffix(SMALLEST), -1.0 if metric.endswith(SMALLEST) else 1.0
        self._seen = 0  # lines of metrics that a checkpoint has counted

    def of(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return what a manifest says of a checkpoint that is taken now; None where it is not compared."""
        lines, self._seen = history[min(self._seen, len(history)) :], len(history)
        for line in reversed(lines) if self.name else ():
            value = line.get(self.name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                where = {"metric": self.name, "value": value, "program": line["program"], "step": line["step"]}
                return {**where, "score": self._sign * value}
        return None

    def rewind(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Go back to a checkpoint, at which these were the lines of metrics."""
        self._seen = len(history)
