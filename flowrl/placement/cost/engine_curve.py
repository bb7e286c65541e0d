"""How fast the engine of a run generates, by batch and length: fitted to its passes, and to calls that had it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, inf
from statistics import median

from .continuous_batch import Engine, seconds_of
from .length_distribution import Lengths

#: What the seconds of a call are made of, in this order: where calls do not tell two of them apart, it is the first.
PARTS = ("step", "row", "context", "prompt", "call")
_PROMPT = PARTS.index("prompt")
_OF_PASSES = tuple(PARTS.index(part) for part in ("step", "row", "context"))
_FEWEST = 6  # calls, below which nothing is fitted
_VARIES = 0.05  # relative spread, from which on a step and a row can be told apart, or prompts from the rest of a call
_SPREAD = 4  # times as many rows in the largest passes as in the smallest, from which on they tell a row from a step
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
class SampledPasses:
    """Passes of a step that gave about as many rows a token each: ``SampledPasses(2, 40, 1250, 61000, 0.21)``.

    ``rows`` and ``context`` are sums over them, of one replica's rows and of the tokens that these had by then.
    """

    step: int
    count: int
    rows: int
    context: int
    seconds: float

    def amounts(self) -> tuple[float, ...]:
        """How much of each part one of them has."""
        return (1.0, self.rows / self.count, self.context / self.count, 0.0, 0.0)


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


def fit_curve(
    calls: Sequence[SampledCall], replicas: int = 1, passes: Sequence[SampledPasses] = ()
) -> EngineCurve | None:
    """Return the curve of calls; None where they are too few, or too alike to tell a step from a row.

    Where an engine told of its passes, and these had few rows and many, they say what a step and a row take: of whole
    calls that are alike nobody can tell. The error is that of a fit to the first half of the steps, told on the second.
    """
    if (found := _fit(calls, replicas, passes)) is None:
        return None
    found = replace(found, calls=len(calls))
    steps = sorted({call.step for call in calls})
    early = set(steps[: len(steps) // 2])
    late = [call for call in calls if call.step not in early]
    seen = [each for each in passes if each.step in early]
    guess = _fit([call for call in calls if call.step in early], replicas, seen)
    if guess is None or not late:
        return found
    pairs = [(guess.of_call(call), call.seconds) for call in late]
    return replace(
        found,
        error=median(abs(p - m) / m for p, m in pairs),
        predicted=median(p for p, _ in pairs),
        measured=median(m for _, m in pairs),
    )


def _fit(calls: Sequence[SampledCall], replicas: int, passes: Sequence[SampledPasses]) -> EngineCurve | None:
    """Return figures alone."""
    if len(calls) < _FEWEST:
        return None
    if (of_passes := _fit_passes(passes)) is not None:
        return EngineCurve(*_fit_calls(calls, replicas, of_passes), replicas=replicas)
    if _tells_apart(calls):
        return EngineCurve(*_fit_calls(calls, replicas), replicas=replicas)
    return None


def _fit_passes(passes: Sequence[SampledPasses]) -> tuple[float, ...] | None:
    """Return what a step, a row and a token of its context take; None where passes are too alike for that.

    Passes of about as many rows count as one, by their median: now and then one takes far longer.
    """
    by_rows: dict[int, list[SampledPasses]] = {}
    for each in (p for p in passes if p.seconds > 0):  # a fake engine may take no time
        by_rows.setdefault((each.rows // each.count).bit_length(), []).append(each)
    middle = [_middle(alike) for _, alike in sorted(by_rows.items())]
    if len(middle) < len(_OF_PASSES) or middle[-1][1][1] < _SPREAD * middle[0][1][1]:
        return None
    rows = [[amount / seconds for amount in amounts] for seconds, amounts in middle]
    return _smallest_fit(rows, [1.0] * len(rows), _OF_PASSES)


def _middle(alike: Sequence[SampledPasses]) -> tuple[float, list[float]]:
    """Return the median seconds and amounts of a pass."""
    amounts = zip(*(each.amounts() for each in alike), strict=True)
    return median(each.seconds / each.count for each in alike), [median(each) for each in amounts]


def _tells_apart(calls: Iterable[SampledCall]) -> bool:
    """Whether calls differ in how many rows a step has on average."""
    widths = [call.tokens / call.longest for call in calls if call.longest]
    return bool(widths) and max(widths) - min(widths) > _VARIES * max(widths)


def _shares(replicas: int) -> tuple[int, ...]:
    """Among how many replicas each part of a call is divided."""
    return (1, replicas, replicas, replicas, 1)


def _fit_calls(
    calls: Sequence[SampledCall], replicas: int, known: Sequence[float] = (0.0,) * len(PARTS)
) -> tuple[float, ...]:
    """Return figures of at least 0 that fit calls by their relative errors, those that are ``known`` as they are.

    A token of a prompt takes at most what a row takes in a step of the average call: it is the same arithmetic, and
    the weights are not read for it alone. Calls that brought about as many tokens of prompts tell nothing of one.
    """
    shares = _shares(replicas)
    used = [call for call in calls if call.seconds > 0]
    rows = [[amount / n / c.seconds for amount, n in zip(c.amounts(), shares, strict=True)] for c in used]
    longest, tokens, context, _, _ = (sum(each) for each in zip(*(call.amounts() for call in calls), strict=True))
    in_a_step = {"step": longest / tokens * replicas, "row": 1.0, "context": context / tokens}
    most = [in_a_step.get(part, 0.0) for part in PARTS]  # of one token of one row

    def usual(figures: Sequence[float]) -> bool:
        return figures[_PROMPT] <= (1 + 1e-6) * sum(f * m for f, m in zip(figures, most, strict=True))

    brought = [call.prompt for call in calls]
    told = [p for p in range(len(PARTS)) if p != _PROMPT or max(brought) - min(brought) > _VARIES * max(brought)]
    if any(known):
        told = [part for part in told if part not in _OF_PASSES]
    targets = [1.0 - sum(f * each for f, each in zip(known, row, strict=True)) for row in rows]
    least = sum(target**2 for target in targets) if any(known) else inf  # what is left without a further part
    found = _smallest_fit(
        rows, targets, told, lambda more: usual([f + k for f, k in zip(more, known, strict=True)]), least
    )
    return tuple(f + k for f, k in zip(found, known, strict=True))


def _smallest_fit(
    rows: Sequence[Sequence[float]],
    targets: Sequence[float],
    told: Sequence[int],
    usual: Callable[[Sequence[float]], bool] = lambda figures: True,
    least: float = inf,
) -> tuple[float, ...]:
    """Return figures of at least 0 for the parts that are ``told``: of sets of parts the smallest that is about as good
    as any; of sets of one size that are about as good the first in the order of the parts. None is a set too where it
    leaves as little as ``least`` of the squares.
    """
    best = (0.0,) * len(PARTS)
    worth = len(rows) ** (-1 / len(rows))  # what a further part has to leave of the rest (Schwarz 1978)
    exact = 1e-18 * len(rows)
    for size in range(1, len(told) + 1):
        sets: list[tuple[float, tuple[float, ...]]] = []
        for chosen in combinations(told, size):
            figures = _solve(rows, targets, chosen)
            if figures is None or min(figures) < 0:
                continue
            whole = [dict(zip(chosen, figures, strict=True)).get(i, 0.0) for i in range(len(PARTS))]
            if not usual(whole):
                continue
            pairs = zip(rows, targets, strict=True)
            rest = sum((t - sum(f * row[c] for f, c in zip(figures, chosen, strict=True))) ** 2 for row, t in pairs)
            sets.append((rest, tuple(whole)))
        if not sets:
            continue
        left = min(rest for rest, _ in sets)
        if left < least * worth:
            least, best = next((rest, whole) for rest, whole in sets if rest * worth <= max(left, exact))
        if least < exact:
            break
    return best


def _solve(rows: Sequence[Sequence[float]], targets: Sequence[float], chosen: Sequence[int]) -> list[float] | None:
    """Return the figures of some columns whose sums are nearest to the targets; None where they are not settled."""
    scale = [max(abs(row[c]) for row in rows) for c in chosen]
    if not all(scale):
        return None
    scaled = [[row[c] / s for c, s in zip(chosen, scale, strict=True)] for row in rows]
    size = len(chosen)
    matrix = [
        [
            *(sum(row[i] * row[j] for row in scaled) for j in range(size)),
            sum(row[i] * target for row, target in zip(scaled, targets, strict=True)),
        ]
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
