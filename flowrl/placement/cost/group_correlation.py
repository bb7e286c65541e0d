"""How alike rows to one prompt are in length: as measured, as drawn, and what it makes of the longest row.

Rows to one prompt are joined by a Gaussian copula: the place of a row in the distribution of all lengths is that of
``sqrt(c) a + sqrt(1 - c) b`` among normal numbers, where ``a`` is the prompt's and ``b`` the row's own. So a
correlation ``c`` changes nothing about how lengths of all rows are distributed.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from math import exp, sqrt
from statistics import NormalDist

_NORMAL = NormalDist()
_ONE = 0.999  # from here on rows to one prompt are taken to be equally long
_REACH, _APART = 8.0, 0.05  # of the numbers of a prompt that are summed over


def draw_normals(chance: random.Random, rows: int, group: int, alike: float) -> Iterator[float]:
    """Yield a normal number for each row; those of the ``group`` rows to a prompt have the correlation ``alike``."""
    common, own = sqrt(alike), sqrt(1 - alike)
    for first in range(0, rows, group):
        prompt = chance.gauss(0, 1)
        yield from (common * prompt + own * chance.gauss(0, 1) for _ in range(min(group, rows - first)))


@lru_cache(maxsize=256)
def part_below_longest(rows: int, group: int, alike: float) -> float:
    """Return the part of all responses that the longest of so many exceeds, as a rule; ``group`` are to one prompt.

    Of rows that have nothing to do with each other it is ``1 - 0.5 / rows``. Of others it is the part that all of them
    stay below with the same probability: fewer rows that differ have a shorter longest one.
    """
    apart = 1 - 0.5 / rows
    if not alike or group < 2:
        return apart
    wanted = apart**group  # of the rows to one prompt, prompts having nothing to do with each other
    if alike > _ONE:
        return wanted
    low, high = -_REACH, _REACH
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _all_below(middle, group, alike) < wanted else (low, middle)
    return _NORMAL.cdf(high)


def _all_below(place: float, group: int, alike: float) -> float:
    """The probability that no number of a prompt's rows is above ``place``: an average over that of the prompt."""
    common, own = sqrt(alike), sqrt(1 - alike)
    count = int(_REACH / _APART)
    numbers = [i * _APART for i in range(-count, count + 1)]
    weights = [exp(-a * a / 2) for a in numbers]
    parts = (w * _NORMAL.cdf((place - common * a) / own) ** group for a, w in zip(numbers, weights, strict=True))
    return sum(parts) / sum(weights)


def correlation(lengths: Sequence[float], prompts: Sequence[Hashable]) -> float | None:
    """Return how alike rows to one prompt are; None of fewer than two prompts, of one row to each, or of equal rows.

    It is the intraclass correlation (Fisher 1925, section 38; from an analysis of variance) of their normal scores: the
    numbers whose places among normal ones are those of the lengths, equal lengths having the place in their middle. It
    is about 0 on average, and may be below it, where the prompt says nothing; of few prompts it is a little too small.
    """
    scores = _scores(lengths)
    groups: dict[Hashable, list[float]] = {}
    for prompt, score in zip(prompts, scores, strict=True):
        groups.setdefault(prompt, []).append(score)
    rows, count = len(scores), len(groups)
    if not 1 < count < rows or not any(scores):
        return None
    of_prompts = sum(sum(group) ** 2 / len(group) for group in groups.values())
    between = of_prompts / (count - 1)
    within = (sum(score * score for score in scores) - of_prompts) / (rows - count)
    each = (rows - sum(len(group) ** 2 for group in groups.values()) / rows) / (count - 1)  # rows to a prompt
    return (between - within) / (between + (each - 1) * within)


def _scores(lengths: Sequence[float]) -> list[float]:
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    scores = [0.0] * len(lengths)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and lengths[order[last + 1]] == lengths[order[first]]:
            last += 1
        score = _NORMAL.inv_cdf(((first + last) / 2 + 0.5) / len(order))
        for place in range(first, last + 1):
            scores[order[place]] = score
        first = last + 1
    return scores
