"""What an update reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Metrics(dict[str, float]):
    """What an update reports, as numbers by name: ``Metrics(loss=0.1, grad_norm=1.2)``.

    ``rows_seen`` is no number: what an update has found of the tokens of rows that are written down, as the engine says
    it. It does not outlive the step.

    >>> metrics = fl.Metrics(loss=0.1, grad_norm=1.2)
    >>> metrics["loss"]
    0.1
    """

    rows_seen: Sequence[Mapping[str, Any]] = ()

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
