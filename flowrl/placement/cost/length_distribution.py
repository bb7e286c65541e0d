"""How long prompts and responses are taken to be: one length for all rows, or a distribution of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist

from ...errors import UsageError, did_you_mean
from .group_correlation import draw_normals, part_below_longest

_KINDS = ("fixed", "lognormal", "uniform")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of responses: ``Lengths(prompt=512, kind="lognormal", numbers=(800, 1.0), most=4096)``.

    ``fixed`` has one number, the length; ``lognormal`` the mean and the sigma of the logarithm, before ``most`` cuts
    the longest; ``uniform`` the shortest and the longest; ``measured`` quantiles from the shortest to the longest,
    equal parts of the rows apart. No response is longer than ``most``. Without a kind every response has ``most``
    tokens. ``alike``: the correlation of rows to one prompt, from 0, where the prompt says nothing, to 1
    (:mod:`flowrl.placement.cost.group_correlation`).
    """

    prompt: float
    most: float
    kind: str = "fixed"
    numbers: tuple[float, ...] = ()
    alike: float = 0.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: works are keys of what is known already, and a measured distribution has many numbers."""
        return hash((self.prompt, self.most, self.kind, self.numbers, self.alike))

    @cached_property
    def mean(self) -> float:
        """Tokens of an average response, none being longer than ``most``."""
        return self._moment(1)

    @cached_property
    def running(self) -> float:
        """Tokens that a running response has so far, on average over rows and time: longer rows run for longer."""
        return self._moment(2) / 2 / self.mean if self.mean else 0.0

    def longest(self, rows: int, group: int = 1) -> float:
        """Tokens of the longest of so many responses, as a rule; ``group`` of them are to one prompt."""
        return self.quantile(part_below_longest(rows, group, self.alike)) if rows else 0.0

    def spread(self, rows: int) -> list[float]:
        """Return the lengths of so many responses, equal parts of the distribution, the shortest first."""
        return [self.quantile((i + 0.5) / rows) for i in range(rows)]

    def quantile(self, part: float) -> float:
        """Return the length that this part of all responses does not exceed."""
        if self.kind == "lognormal":
            mu, sigma = self._normal
            return min(math.exp(mu + sigma * NormalDist().inv_cdf(part)) if sigma else math.exp(mu), self.most)
        if self.kind == "fixed" or not self.numbers:
            return self.mean
        return min(self._between(part * (len(self.numbers) - 1)), self.most)

    def _moment(self, power: int) -> float:
        """The mean of a response's tokens to the power 1 or 2."""
        if not self.numbers or self.kind == "fixed":
            return min(self.numbers[0], self.most) ** power if self.numbers else self.most**power
        if self.kind == "lognormal":
            return self._moment_of_lognormal(power)
        return sum(_moment(a, b, self.most, power) for a, b in pairwise(self.numbers)) / (len(self.numbers) - 1)

    def _moment_of_lognormal(self, power: int) -> float:
        """E[min(X, most)^k]: ``exp(k mu + k^2 s^2 / 2) P(Z < z - k s) + most^k P(Z > z)``, z being where most lies."""
        mu, sigma = self._normal
        if not sigma:
            return min(math.exp(mu), self.most) ** power
        whole = math.exp(power * mu + (power * sigma) ** 2 / 2)
        if math.isinf(self.most):
            return whole
        z, normal = (math.log(self.most) - mu) / sigma, NormalDist()
        return whole * normal.cdf(z - power * sigma) + self.most**power * normal.cdf(-z)

    @property
    def _normal(self) -> tuple[float, float]:
        """Mean and sigma of the logarithm."""
        mean, sigma = self.numbers
        return math.log(mean) - sigma * sigma / 2, sigma

    @property
    def words(self) -> str:
        """The distribution of responses in words: ``lognormal, mean 800, sigma 1``."""
        if not self.numbers:
            return f"{self.most:g}"
        if self.kind == "fixed":
            return f"{self.mean:.4g}"
        return self._words + (f", correlated by {self.alike:.2g} within a prompt" if self.alike else "")

    @property
    def _words(self) -> str:
        if self.kind == "uniform":
            return f"uniform from {self.numbers[0]:g} to {self.numbers[1]:g}"
        if self.kind == "lognormal":
            most = f", at most {self.most:g}" if self.most < math.inf else ""
            return f"lognormal, mean {self.numbers[0]:g}, sigma {self.numbers[1]:g}{most}"
        return f"as measured, mean {self.mean:.3g}, from {self.numbers[0]:g} to {self.numbers[-1]:g}"

    @property
    def varies(self) -> bool:
        """Whether rows have lengths of their own."""
        return self.kind != "fixed"

    def draw(self, rows: int, seed: str, group: int = 1) -> Sequence[float]:
        """Return lengths of so many rows, the same ones for the same seed; ``group`` rows in a row are to one prompt.

        Quantiles that were measured are those of a step, so its rows have them all, in some order.
        """
        chance = random.Random(seed)
        if self.alike and group > 1 and self.varies:
            return self._of_normals(list(draw_normals(chance, rows, group, self.alike)))
        if self.kind == "measured" and rows > 1:
            parts = [i / (rows - 1) * (len(self.numbers) - 1) for i in range(rows)]
            chance.shuffle(parts)
            return [min(max(1.0, self._between(part)), self.most) for part in parts]
        one = self._one()
        return [min(max(1.0, one(chance)), self.most) for _ in range(rows)]

    def _of_normals(self, numbers: Sequence[float]) -> Sequence[float]:
        """The lengths whose places among all lengths are those of some normal numbers."""
        if self.kind == "measured":
            order, parts = sorted(range(len(numbers)), key=numbers.__getitem__), [0.0] * len(numbers)
            for place, row in enumerate(order):
                parts[row] = place / max(1, len(numbers) - 1)
        else:
            parts = [NormalDist().cdf(number) for number in numbers]
        if self.kind == "lognormal":
            mu, sigma = self._normal
            return [min(max(1.0, math.exp(mu + sigma * number)), self.most) for number in numbers]
        return [min(max(1.0, self.quantile(part)), self.most) for part in parts]

    def _one(self) -> Callable[[random.Random], float]:
        if self.kind == "lognormal":
            mu, sigma = self._normal
            return lambda chance: chance.lognormvariate(mu, sigma)
        if self.kind == "uniform":
            return lambda chance: chance.uniform(*self.numbers)
        if self.kind == "measured":
            return lambda chance: self._between(chance.random() * (len(self.numbers) - 1))
        return lambda chance: self.mean

    def _between(self, place: float) -> float:
        """The length between two quantiles."""
        low = min(int(place), len(self.numbers) - 2)
        a, b = self.numbers[low], self.numbers[low + 1]
        return a + (b - a) * (place - low)


def _moment(low: float, high: float, most: float, power: int) -> float:
    """Mean of min(x, most)^power for x uniform from ``low`` to ``high``."""
    if most <= low or low == high:
        return min(low, most) ** power
    top = min(high, most)
    inside = (top ** (power + 1) - low ** (power + 1)) / (power + 1)
    return (inside + most**power * (high - top) if high > top else inside) / (high - low)


def read_lengths(text: str) -> tuple[str, tuple[float, ...], float]:
    """Read ``fixed:1024``, ``lognormal:800,1.0`` (mean, sigma), ``lognormal:800,1.0,4096`` (and the most),
    ``uniform:1,2048``, or ``lognormal:800,1.0,alike=0.6``: the correlation of rows to one prompt comes last.

    Raises UsageError.
    """
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        fix = did_you_mean(kind, _KINDS, form="Did you mean {}?")
        raise UsageError(f"--lengths {text}: '{kind}' is no distribution.", have=_KINDS, fix=fix)
    wanted = {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}[kind]
    rest, _, said = rest.partition(",alike=")
    alike = _alike(text, kind, said) if said else 0.0
    numbers: tuple[float, ...] = ()
    with suppress(ValueError):
        numbers = tuple(float(part) for part in rest.split(","))
    fits = len(numbers) in wanted and min(numbers) >= 0 and sum(numbers[:1]) > 0 and math.isfinite(sum(numbers))
    if not fits or (kind == "uniform" and list(numbers) != sorted(numbers)):
        fix = {"fixed": "fixed:TOKENS", "lognormal": "lognormal:MEAN,SIGMA[,MOST]", "uniform": "uniform:LEAST,MOST"}[
            kind
        ]
        raise UsageError(f"--lengths {text}: these are no lengths.", fix=f"Write {fix}, such as lognormal:800,1.0.")
    return kind, numbers, alike


def _alike(text: str, kind: str, said: str) -> float:
    """The correlation of rows to one prompt. Raises UsageError."""
    if kind == "fixed":
        fix = "Take it out, or write lognormal:800,1.0,alike=0.6."
        raise UsageError(f"--lengths {text}: rows of one length have no correlation.", fix=fix)
    number = math.nan
    with suppress(ValueError):
        number = float(said)
    if not 0 <= number <= 1:
        what = f"--lengths {text}: alike is the correlation of rows to one prompt, from 0 to 1, not {said}."
        raise UsageError(what, fix="Write alike=0.6 at the end, or leave it out.")
    return number
