"""Whether the lengths of trained rows are those of all rows: a distance, and what chance makes of it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

KEPT = 256  # groups: the statistic is that of the last ones that are done
SHUFFLES = 100
LEVEL = 0.99  # of the shuffles lie below the bound


@dataclass(frozen=True)
class GroupLengths:
    """The lengths of a prompt's rows, and which of them were trained on: ``GroupLengths([3, 9], [True, False])``."""

    lengths: Sequence[int]
    trained: Sequence[bool]


@dataclass(frozen=True)
class LengthBias:
    """``LengthBias(0.02, 0.06, rows=512, trained=448, groups=64)``.

    ``distance`` is that of Kolmogorov and Smirnov between the lengths of trained rows and those of all admitted ones:
    the largest difference of the two shares of rows that are at most so long. ``bound`` is what it stays below in 99 of
    100 cases where which rows are trained has nothing to do with their lengths: the choice of each group is handed to
    another group as a whole, and to its rows in any order. Above the bound, the choice depends on lengths.
    """

    distance: float
    bound: float
    rows: int
    trained: int
    groups: int

    @property
    def is_biased(self) -> bool:
        """Whether chance does not explain the distance."""
        return self.distance > self.bound


def length_bias(groups: Sequence[GroupLengths], seed: int = 0) -> LengthBias | None:
    """Return the distance of lengths in these groups, with its bound; None without rows, or without a trained one."""
    every = Counter(length for group in groups for length in group.lengths)
    trained = [sum(group.trained) for group in groups]
    if not every or not sum(trained):
        return None
    chosen = [n for g in groups for n, taken in zip(g.lengths, g.trained, strict=True) if taken]
    counts = (every.total(), len(chosen), len(groups))
    if len(chosen) == every.total():
        return LengthBias(0.0, 0.0, *counts)
    drawn = random.Random(seed)
    alike: dict[int, list[int]] = defaultdict(list)  # groups with as many rows
    for number, group in enumerate(groups):
        alike[len(group.lengths)].append(number)
    found: list[float] = []
    for _ in range(SHUFFLES):
        sample: list[int] = []
        for numbers in alike.values():
            for number, other in zip(numbers, drawn.sample(numbers, len(numbers)), strict=True):
                sample += drawn.sample(groups[number].lengths, trained[other])
        found.append(_distance(sample, every))
    return LengthBias(_distance(chosen, every), sorted(found)[round(LEVEL * SHUFFLES) - 1], *counts)


def _distance(some: Sequence[int], every: Counter[int]) -> float:
    """The distance of Kolmogorov and Smirnov between some lengths and all."""
    mine, a, b, largest = Counter(some), 0, 0, 0.0
    whole = every.total()
    for length in sorted(every):
        a, b = a + mine[length], b + every[length]
        largest = max(largest, abs(a / len(some) - b / whole))
    return largest
