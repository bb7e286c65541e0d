"""How fast the engine of a run generates, by batch and length: fitted to whole calls that had the engine alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil
from statistics import median

from .continuous_batch import Engine, seconds_of
from .length_distribution import Lengths

#: What the seconds of a call are made of, in this order: where calls do not tell two of them apart, it is the first.
PARTS = ("step", "row", "context", "prompt", "call")
_PROMPT = PARTS.index("prompt")
_FEWEST = 6  # calls, below which nothing is fitted
_VARIES = 0.05  # relative spread, from which on a step and a row can be told apart, or prompts from the rest of a call
_UNLIMITED = 1 << 40  # rows at once


@dataclass(frozen=True)
class SampledCall:
    """A call that had its engine alone: ``SampledCall(2, 1.4, prompt=96, longest=64, tokens=900, context=31000)``.

    ``prompt``: tokens of all prompts. ``longest``: tokens of the longest response, ``tokens`` of all. ``context``: the
    tokens that each sampled token came after, summed.
    """

    step: int
    seconds: float
    prompt: float
    longest: float
    tokens: float
    context: float

    def amounts(self) -> tuple[float, ...]:
        """How much of each part it has."""
        return (self.longest, self.tokens, self.context, self.prompt, 1.0)


@dataclass(frozen=True)
class EngineCurve:
    """Seconds of an engine: ``EngineCurve(step=1e-3, row=4e-5, context=1e-8, prompt=2e-5, call=0.01)``.

    ``step``: of a token of all rows that run, however few. ``row``: of each row in it. ``context``: of each token that
    such a row has by then. ``prompt``: of each token of a prompt. ``call``: of a call, whatever it asks for. They are
    of one replica among ``replicas``, which share the rows evenly. ``error``, ``predicted`` and ``measured`` are as
    those of a :class:`~.calibrated_costs.Fit`, of ``calls`` calls.
    """

    step: float = 0.0
    row: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    call: float = 0.0
    replicas: int = 1
    error: float | None = None
    predicted: float = 0.0
    measured: float = 0.0
    calls: int = 0

    def engine(self, lengths: Lengths, replicas: int) -> Engine:
        """Return an engine of so many replicas whose rows have these lengths.

        Where prompts were too short to tell what a token of them takes, one that is computed again after a publish
        takes what a row takes in a step: the same arithmetic, without reading the weights for it alone.
        """
        each = self.row + self.context * (lengths.prompt + lengths.running)
        return Engine(
            _UNLIMITED,
            lambda rows: self.step + each * ceil(rows / replicas),
            self.prompt / replicas,
            lengths.prompt,
            again=(self.prompt or each) / replicas,
            call=self.call,
        )

    def seconds(self, rows: int, lengths: Lengths, replicas: int) -> float:
        """Return what a call of so many rows takes that has the engine alone."""
        return seconds_of(self.engine(lengths, replicas), lengths.spread(rows))

    def of_call(self, call: SampledCall) -> float:
        """Return what it predicts for a call that was measured."""
        parts = (self.step, self.row, self.context, self.prompt, self.call)
        return sum(p * amount / n for p, amount, n in zip(parts, call.amounts(), _shares(self.replicas), strict=True))


def fit_curve(calls: Sequence[SampledCall], replicas: int = 1) -> EngineCurve | None:
    """Return the curve of calls; None where they are too few, or too alike to tell a step from a row.

    The error is that of a fit to the first half of the steps, told on the second half.
    """
    if len(calls) < _FEWEST or not _tells_apart(calls):
        return None
    found = replace(_least_squares(calls, replicas), calls=len(calls))
    steps = sorted({call.step for call in calls})
    early = set(steps[: len(steps) // 2])
    seen = [call for call in calls if call.step in early]
    late = [call for call in calls if call.step not in early]
    if not late or len(seen) < _FEWEST or not _tells_apart(seen):
        return found
    guess = _least_squares(seen, replicas)
    pairs = [(guess.of_call(call), call.seconds) for call in late]
    return replace(
        found,
        error=median(abs(p - m) / m for p, m in pairs),
        predicted=median(p for p, _ in pairs),
        measured=median(m for _, m in pairs),
    )


def _tells_apart(calls: Iterable[SampledCall]) -> bool:
    """Whether calls differ in how many rows a step has on average."""
    widths = [call.tokens / call.longest for call in calls if call.longest]
    return bool(widths) and max(widths) - min(widths) > _VARIES * max(widths)


def _shares(replicas: int) -> tuple[int, ...]:
    """Among how many replicas each part of a call is divided."""
    return (1, replicas, replicas, replicas, 1)


def _least_squares(calls: Sequence[SampledCall], replicas: int) -> EngineCurve:
    """Fit figures of at least 0 to relative errors; of sets of parts the smallest that is about as good as any.

    Of sets of one size that are about as good it is the first in the order of the parts.

    A token of a prompt takes at most what a row takes in a step of the average call: it is the same arithmetic, and
    the weights are not read for it alone. Calls that brought about as many tokens of prompts tell nothing of one.
    """
    shares = _shares(replicas)
    rows = [
        [amount / n / call.seconds for amount, n in zip(call.amounts(), shares, strict=True)]
        for call in calls
        if call.seconds > 0
    ]
    longest, tokens, context, _, _ = (sum(each) for each in zip(*(call.amounts() for call in calls), strict=True))
    in_a_step = {"step": longest / tokens * replicas, "row": 1.0, "context": context / tokens}
    most = [in_a_step.get(part, 0.0) for part in PARTS]  # of one token of one row
    brought = [call.prompt for call in calls]
    told = [p for p in range(len(PARTS)) if p != _PROMPT or max(brought) - min(brought) > _VARIES * max(brought)]
    best, least = (0.0,) * len(PARTS), math.inf
    worth = len(rows) ** (-1 / len(rows))  # what a further part has to leave of the rest (Schwarz 1978)
    exact = 1e-18 * len(rows)
    for size in range(1, len(PARTS) + 1):
        sets: list[tuple[float, tuple[float, ...]]] = []
        for chosen in combinations(told, size):
            figures = _solve(rows, chosen)
            if figures is None or min(figures) < 0:
                continue
            whole = [dict(zip(chosen, figures, strict=True)).get(i, 0.0) for i in range(len(PARTS))]
            if whole[_PROMPT] > (1 + 1e-6) * sum(f * m for f, m in zip(whole, most, strict=True)):
                continue
            rest = sum((1 - sum(f * row[c] for f, c in zip(figures, chosen, strict=True))) ** 2 for row in rows)
            sets.append((rest, tuple(whole)))
        if not sets:
            continue
        left = min(rest for rest, _ in sets)
        if left < least * worth:
            least, best = next((rest, whole) for rest, whole in sets if rest * worth <= max(left, exact))
        if least < exact:
            break
    return EngineCurve(*best, replicas=replicas)


def _solve(rows: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Return the figures of some columns whose sums are nearest to 1 in each row; None where they are not settled."""
    scale = [max(abs(row[c]) for row in rows) for c in chosen]
    if not all(scale):
        return None
    scaled = [[row[c] / s for c, s in zip(chosen, scale, strict=True)] for row in rows]
    size = len(chosen)
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)] + [sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(matrix[r][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-9 * len(rows):
            return None
        for r in range(size):
            if r != i:
                part = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - part * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]
