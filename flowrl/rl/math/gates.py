"""The gates of a policy loss: of the ratio and the advantage a loss per token; see :mod:`flowrl.rl.gates`.

Each gives the loss and, where there is one, which tokens were held back; [total] each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..loss_spec import LossInputs
from .ratio import Moved

Gated = tuple[Tensor, Tensor | None]


def _ppo(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float, dual: float | None = None) -> Gated:
    plain, held = moved.ratio * a, moved.ratio.clamp(1 - low, 1 + high) * a
    loss = -torch.minimum(plain, held)
    if dual is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -dual * a), loss)
    return loss, held < plain


def _cispo(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float) -> Gated:
    w = moved.ratio.detach()
    return -w.clamp(low, high) * a * x.predicted, (w < low) | (w > high)


def _surrogate(x: LossInputs, moved: Moved, a: Tensor) -> Gated:
    return -moved.ratio * a, None


def _vespo(
    x: LossInputs, moved: Moved, a: Tensor, *, positive: tuple[float, float], negative: tuple[float, float]
) -> Gated:
    log, rises = moved.log.detach(), a >= 0
    power, decay = (torch.full_like(log, n).masked_fill(rises, p) for p, n in zip(positive, negative, strict=True))
    return -(decay + power * log - decay * log.exp()).exp() * a * x.predicted, None


def _sapo(x: LossInputs, moved: Moved, a: Tensor, *, positive: float, negative: float) -> Gated:
    t = torch.full_like(moved.log, negative).masked_fill(a > 0, positive)
    return (4 / t) * (torch.sigmoid(t * (1 - moved.ratio)) - 1) * a, None  # exact slopes for large ratios too


def _gmpo(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float) -> Gated:
    whole = x.row_mean(a)
    held = moved.log.clamp(-low, high)
    lower = torch.where(x.spread(whole) >= 0, torch.minimum(moved.log, held), torch.maximum(moved.log, held))
    loss = -whole * x.row_mean(lower).exp()
    return x.spread(loss), lower != moved.log


def _dppo(x: LossInputs, moved: Moved, a: Tensor, *, kind: str, low: float, high: float, cap: float) -> Gated:
    p, q = x.predicted.detach().exp(), moved.before.exp()
    rise = p - q
    far = rise.abs() if kind == "tv" else _two_outcomes(q, p)
    away = torch.where(a > 0, (rise > 0) & (far > high), (rise < 0) & (far > low))
    return -(moved.ratio.detach().clamp(max=cap) * a * x.predicted * ~away), away


def _two_outcomes(q: Tensor, p: Tensor) -> Tensor:
    """``KL(q, p)`` of two outcomes with these probabilities, in nats."""
    tiny = torch.finfo(p.dtype).tiny
    rest = ((1 - q).clamp(min=tiny) / (1 - p).clamp(min=tiny)).log()
    return q * (q.clamp(min=tiny) / p.clamp(min=tiny)).log() + (1 - q) * rest


def _reinforce(x: LossInputs, moved: Moved | None, a: Tensor) -> Gated:
    return -a * x.predicted, None


def _quadratic(x: LossInputs, moved: Moved, a: Tensor, *, temperature: float) -> Gated:
    return -a * x.predicted + temperature / 2 * moved.log.square(), None


def _topr(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float) -> Gated:
    w = moved.ratio.detach()
    tapered = torch.where(a > 0, torch.ones_like(w), w.clamp(low, high))
    return -tapered * a * x.predicted, (a <= 0) & ((w < low) | (w > high))


def _clip_cov(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float) -> Gated:
    loss, held = _ppo(x, moved, a, low=low, high=high)
    selected = x["selected"]
    return loss * ~selected, selected if held is None else held | selected


def _kl_cov(x: LossInputs, moved: Moved, a: Tensor, *, weight: float) -> Gated:
    return -moved.ratio * a + weight * moved.log.abs() * x["selected"], x["selected"]


GATES: Mapping[str, Callable[..., Gated]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "surrogate": _surrogate,
    "gmpo": _gmpo,
    "dppo": _dppo,
    "reinforce": _reinforce,
    "quadratic": _quadratic,
    "topr": _topr,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}
