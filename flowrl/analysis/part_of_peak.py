"""The part of a peak at which works take the seconds that they took: found by halving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..placement.cost.efficiency import Efficiency
from ..placement.cost.roofline import Roofline
from ..placement.cost.work import Work

LEAST = 1e-6  # part of a peak
_HALVINGS = 60


def fit_part(
    found: Efficiency, names: Sequence[str], took: Sequence[tuple[Work, float]], roofline: Roofline
) -> Efficiency:
    """The figures with one part of a peak for all of ``names``, at which these works take what they took together."""
    whole = sum(seconds for _, seconds in took)
    if not whole:
        return found

    def seconds(part: float) -> float:
        there = replace(roofline, efficiency=with_part(found, names, part))
        return sum(there.seconds(work) for work, _ in took)

    if seconds(1.0) == seconds(0.5):  # nothing of it is computed, or sent
        return found
    return with_part(found, names, solve(seconds, whole, least=LEAST, most=1.0, falls=True))


def solve(seconds: Callable[[float], float], wanted: float, *, least: float, most: float, falls: bool) -> float:
    """Where seconds that only fall, or only rise, are those that are wanted; the nearer end where they nowhere are."""
    low, high = least, most
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5 if falls else (low + high) / 2
        if (seconds(middle) > wanted) == falls:
            low = middle
        else:
            high = middle
    return high if falls else low


def with_part(found: Efficiency, names: Iterable[str], part: float) -> Efficiency:
    """The figures with this part of a peak for all of ``names``."""
    return replace(found, **dict.fromkeys(names, part))
