"""How long prompts and responses are taken to be: one length for all rows, or a distribution of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from ...errors import UsageError, did_you_mean

_KINDS = ("fixed", "lognormal", "uniform")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of responses: ``Lengths(prompt=512, kind="lognormal", numbers=(800, 1.0), most=4096)``.

    ``fixed`` has one number, the length; ``lognormal`` the mean and the sigma of the logarithm; ``uniform`` the
    shortest and the longest; ``measured`` quantiles from the shortest to the longest, equal parts of the rows apart.
    No response is longer than ``most``. Without a kind every response has ``most`` tokens.
    """

    prompt: float
    most: float
    kind: str = "fixed"
    numbers: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Tokens of an average response."""
        if not self.numbers:
            return self.most
        if self.kind == "uniform":
            return min(sum(self.numbers) / 2, self.most)
        if self.kind == "measured":
            between = [(a + b) / 2 for a, b in pairwise(self.numbers)]
            return min(sum(between) / len(between), self.most)
        return min(self.numbers[0], self.most)

    @property
    def words(self) -> str:
        """The distribution of responses in words: ``lognormal, mean 800, sigma 1``."""
        if not self.numbers:
            return f"{self.most:g}"
        if self.kind == "fixed":
            return f"{self.mean:.4g}"
        if self.kind == "uniform":
            return f"uniform from {self.numbers[0]:g} to {self.numbers[1]:g}"
        if self.kind == "lognormal":
            return f"lognormal, mean {self.numbers[0]:g}, sigma {self.numbers[1]:g}"
        return f"as measured, mean {self.mean:.3g}, from {self.numbers[0]:g} to {self.numbers[-1]:g}"

    @property
    def varies(self) -> bool:
        """Whether rows have lengths of their own."""
        return self.kind != "fixed"

    def draw(self, rows: int, seed: str) -> Sequence[float]:
        """Return lengths of so many rows, the same ones for the same seed."""
        chance = random.Random(seed)
        one = self._one()
        return [min(max(1.0, one(chance)), self.most) for _ in range(rows)]

    def _one(self) -> Callable[[random.Random], float]:
        if self.kind == "lognormal":
            mean, sigma = self.numbers
            mu = math.log(mean) - sigma * sigma / 2
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


def read_lengths(text: str) -> tuple[str, tuple[float, ...]]:
    """Read ``fixed:1024``, ``lognormal:800,1.0`` (mean, sigma) or ``uniform:1,2048``. Raises UsageError."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        fix = did_you_mean(kind, _KINDS, form="Did you mean {}?")
        raise UsageError(f"--lengths {text}: '{kind}' is no distribution.", have=_KINDS, fix=fix)
    wanted = 1 if kind == "fixed" else 2
    numbers: tuple[float, ...] = ()
    with suppress(ValueError):
        numbers = tuple(float(part) for part in rest.split(","))
    fits = len(numbers) == wanted and min(numbers) >= 0 and sum(numbers[:1]) > 0 and math.isfinite(sum(numbers))
    if not fits or (kind == "uniform" and list(numbers) != sorted(numbers)):
        fix = {"fixed": "fixed:TOKENS", "lognormal": "lognormal:MEAN,SIGMA", "uniform": "uniform:LEAST,MOST"}[kind]
        raise UsageError(f"--lengths {text}: these are no lengths.", fix=f"Write {fix}, such as lognormal:800,1.0.")
    return kind, numbers
