"""Numbers that a program carries from step to step: coefficients that follow what they control.

They are ops, so nothing waits for them: ``coef = rl.adaptive_kl(coef, metrics.kl, target=0.02, rows=512)``.
"""

from __future__ import annotations

import math

from ..errors import ProgramError
from ..graph.ops.allowed import number
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op


@op(owner="rl", cost="local")
def clamp(value: float, *, low: float = -math.inf, high: float = math.inf) -> float:
    """The number, or the bound that it is beyond.

    >>> rl.clamp(1.5, low=0.0, high=1.0)
    1.0
    """
    _bounds("clamp", low, high)
    return min(max(float(value), low), high)


@op(owner="rl", cost="local")
def adaptive_kl(coef: float, kl: float, *, target: float, horizon: float = 10_000, rows: float = 1) -> float:
    """``coef (1 + e rows / horizon)``, ``e = clamp(kl / target - 1, -0.2, 0.2)`` (arXiv:1909.08593, section 2.2).

    ``kl``: nats, in the units of ``target``; ``rows``: how many were trained since the last call. A KL that is no
    number leaves the coefficient as it is, and it never falls below 0. Raises ProgramError for a target or a horizon
    that is not above 0.

    >>> round(rl.adaptive_kl(0.1, kl=12.0, target=6.0, rows=1000), 6)
    0.102
    """
    if not target > 0:
        raise ProgramError(f"rl.adaptive_kl: target={target}.", fix="Give a KL above 0, in nats.")
    if not horizon > 0:
        raise ProgramError(f"rl.adaptive_kl: horizon={horizon}.", fix="Give a number of rows, such as 10_000.")
    if math.isnan(float(kl)):
        return float(coef)
    error = min(max(float(kl) / target - 1, -0.2), 0.2)
    return float(coef) * max(0.0, 1 + error * rows / horizon)


@op(owner="rl", cost="local")
def adaptive_entropy(
    coef: float, entropy: float, *, target: float, step: float = 1e-3, low: float = 0.0, high: float = 0.1
) -> float:
    """``coef + step`` while the entropy is at most ``target``, else ``coef - step``, inside ``[low, high]``.

    Skywork-OR1 (arXiv:2505.22312, section 3.2.5). Departure: there the bonus also has the weight 0 while the entropy is
    above the target; here it has the coefficient, which falls. ``entropy`` and ``target`` are nats per token; an
    entropy that is no number leaves the coefficient as it is. Start it above 0, such as at 1e-4: a weight of 0 computes
    no entropy.

    >>> round(rl.adaptive_entropy(1e-3, entropy=0.2, target=0.5), 6)
    0.002
    """
    _bounds("adaptive_entropy", low, high)
    if math.isnan(float(entropy)):
        return float(coef)
    moved = float(coef) + (step if float(entropy) <= target else -step)
    return min(max(moved, low), high)


@op(owner="rl", cost="local")
@takes(rate=number(least=0), high=number(above=0))
def lagrange(multiplier: float, cost: float, *, limit: float = 0.0, rate: float = 0.1, high: float = 10.0) -> float:
    """``m exp(rate m (cost - limit))``, at most ``high``: the multiplier of a constraint ``cost <= limit``.

    Gradient ascent on ``ln m`` (Safe RLHF, arXiv:2310.12773, eq. 31). ``multiplier`` starts above 0 and stays there.

    >>> round(rl.lagrange(1.0, cost=0.5, limit=0.2), 4)
    1.0305
    """
    if not float(multiplier) > 0:
        raise ProgramError(f"rl.lagrange: multiplier={multiplier}.", fix="Start it above 0, such as at 1.0.")
    grown = rate * float(multiplier) * (float(cost) - limit)
    return min(float(multiplier) * math.exp(min(max(grown, -20.0), 20.0)), high)


def _bounds(name: str, low: float, high: float) -> None:
    if low > high:
        raise ProgramError(f"rl.{name}: low={low} is above high={high}.", fix="Give low <= high.")
