"""How far the trainer's log-probabilities of sampled tokens lie from those of the engine that sampled them.

An update computes them anyway, so the gap costs no pass: it is taken from the first optimizer step, which starts from
the weights that the rows were sampled with. Later steps of the update start from others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..rl.math.kl import estimate
from ..workers.gap import EXPECTED, LARGEST, MEASURES, TOKENS

__all__ = ["EXPECTED", "BOUNDS", "add_sums", "bound_of", "gap_of", "gap_sums", "is_measure"]

#: The largest difference of one token's log-probability that rounding explains, by the dtype of the computation.
BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


def bound_of(dtype: torch.dtype) -> float:
    """Return the bound of a token's difference, in nats."""
    return BOUNDS[dtype]


def is_measure(name: str) -> bool:
    """Return whether a sum is one of the gap's, and nothing that a loss reports."""
    return name in MEASURES


def gap_sums(found: Tensor, expected: Tensor, bound: float) -> dict[str, Tensor]:
    """Return the sums of the gap over tokens [total]; ``expected`` is NaN where a token is not compared.

    >>> sums = gap_sums(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, math.nan]), 0.25)
    >>> float(sums["gap_mean"]), float(sums["gap_beyond"]), float(sums["gap_tokens"])
    (0.5, 1.0, 1.0)
    """
    there = ~expected.isnan()
    found, expected = found.detach()[there].double(), expected[there].double()
    apart = (found - expected).abs()
    return {
        "gap_mean": apart.sum(),
        LARGEST: apart.max() if len(apart) else apart.sum(),
        "gap_k3": estimate(expected, found, "k3").sum(),
        "gap_beyond": (~(apart <= bound)).sum().double(),
        TOKENS: there.sum().double(),
    }


def add_sums(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the sums of one pass to those of others, in place; of the largest gap the larger one stays."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        elif name.endswith(LARGEST):
            total[name] = max(total[name], value, key=float)
        else:
            total[name] = total[name] + value


def gap_of(sums: Iterable[Mapping[str, float]], bound: float) -> dict[str, float]:
    """Return the metrics of the gap from the sums of all ranks; no numbers where no token was compared."""
    total: dict[str, float] = {}
    for part in sums:
        add_sums(total, {name: value for name, value in part.items() if is_measure(name)})
    tokens = total.get(TOKENS, 0.0)
    if not tokens:
        return {**dict.fromkeys(MEASURES, math.nan), TOKENS: 0.0, "gap_bound": bound}
    whole = {LARGEST, TOKENS}
    means = {name: total[name] if name in whole else total[name] / tokens for name in MEASURES}
    return {**means, "gap_bound": bound}
