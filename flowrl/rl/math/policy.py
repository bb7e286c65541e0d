"""The policy loss in parts: ratio, gate, correction, KL and entropy; see :func:`flowrl.rl.policy_loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..spec import LossInputs
from .kl import estimate, full, guarded

if TYPE_CHECKING:
    from ..policy import Correction, Gate


def policy_loss(
    x: LossInputs,
    *,
    gate: Gate,
    ratio: str,
    anchor: str,
    corrections: Sequence[Correction],
    kl: float,
    kl_kind: str,
    kl_weighted: bool,
    entropy: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token [total], and what it reports [total]."""
    advantages, reports = x["advantages"], dict[str, Tensor]()
    referred = "ref_logprobs" in x.fields if kl_kind != "full" else x.distribution is not None
    moved = None
    if gate.follows or (kl_weighted and referred):
        before = anchored(x, anchor)
        moved = Moved(before, at_level(x, guarded(x.predicted - before), ratio))
        reports |= {"ratio": moved.ratio.detach(), "approx_kl": estimate(before, x.predicted.detach(), "k3")}
    loss, clipped = GATES[gate.name](x, moved, advantages, **gate.parameters)
    if clipped is not None:
        reports["clip_fraction"] = clipped.to(loss.dtype).detach()
    if corrections:
        reports["weight"] = correction_weights(x, corrections, anchor)
        loss = loss * reports["weight"]
    if referred:
        if kl_kind == "full":
            assert x.distribution is not None, "the loss asked for it"
            divergence = full(x.distribution, x["ref_distribution"])
        else:
            divergence = estimate(x.predicted, x["ref_logprobs"], kl_kind)
        if kl_weighted and moved is not None:
            divergence = divergence * moved.ratio
        loss = loss + kl * divergence
        reports["kl"] = divergence.detach()
    if x.entropy is not None:
        loss = loss - entropy * x.entropy
        reports["entropy"] = x.entropy.detach()
    return loss, reports


def anchored(x: LossInputs, anchor: str) -> Tensor:
    """Log-probabilities of the anchor's policy [total], without gradient."""
    if anchor != "loglinear":
        return x[f"{anchor}_logprobs"]
    sampled = x["rollout_logprobs"]
    age = (x.version - x["versions"]).clamp(min=0).to(sampled.dtype)
    return sampled + age / (age + 1) * (x.predicted.detach() - sampled)


def at_level(x: LossInputs, moved: Tensor, level: str) -> Tensor:
    """Log-ratios [total] of tokens, or of their rows, spread over the row's tokens."""
    if level == "token":
        return moved
    if level == "sequence":
        return guarded(x.row_sum(moved))[x.row]
    mean = x.row_mean(moved)[x.row]
    return mean if level == "geometric" else mean.detach() + moved - moved.detach()


def correction_weights(x: LossInputs, corrections: Sequence[Correction], anchor: str) -> Tensor:
    """The product of the corrections' factors [total], without gradient."""
    nearer = x.predicted.detach() if anchor == "rollout" else anchored(x, anchor)
    moved = guarded(nearer - x["rollout_logprobs"])
    weight = torch.ones_like(moved)
    for c in corrections:
        if c.how == "veto":
            bad = x.row_sum((moved < math_log(c.low, moved)).to(moved.dtype)) > 0
            weight = weight * (~bad)[x.row]
            continue
        w = at_level(x, moved, c.level).exp()
        inside = (w >= c.low) & (w <= c.high)
        factor = {
            "weigh": w,
            "truncate": w.clamp(max=c.high),
            "clip": w.clamp(c.low, c.high),
            "mask": w * inside,
            "reject": inside.to(w.dtype),
        }
        weight = weight * factor[c.how]
    return weight


def math_log(number: float, like: Tensor) -> Tensor:
    """``log(number)`` as a tensor; -inf for 0."""
    return torch.tensor(number, dtype=like.dtype, device=like.device).log()


# -- gates: loss and, where there is one, which tokens were held back; [total] each ------------------------------------

Gated = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Moved:
    """Where the policy is from its anchor: the anchor's log-probabilities and the log-ratios, [total] each."""

    before: Tensor
    log: Tensor

    @cached_property
    def ratio(self) -> Tensor:
        return self.log.exp()


def _ppo(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float, dual: float | None = None) -> Gated:
    plain, held = moved.ratio * a, moved.ratio.clamp(1 - low, 1 + high) * a
    loss = -torch.minimum(plain, held)
    if dual is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -dual * a), loss)
    return loss, held < plain


def _cispo(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float) -> Gated:
    w = moved.ratio.detach()
    return -w.clamp(low, high) * a * x.predicted, (w < low) | (w > high)


def _sapo(x: LossInputs, moved: Moved, a: Tensor, *, positive: float, negative: float) -> Gated:
    t = torch.full_like(moved.log, negative).masked_fill(a > 0, positive)
    return -(4 / t) * torch.sigmoid(t * (moved.ratio - 1)) * a, None


def _gmpo(x: LossInputs, moved: Moved, a: Tensor, *, low: float, high: float) -> Gated:
    whole = x.row_mean(a)
    held = moved.log.clamp(-low, high)
    lower = torch.where(whole[x.row] >= 0, torch.minimum(moved.log, held), torch.maximum(moved.log, held))
    loss = -whole * x.row_mean(lower).exp()
    return loss[x.row], lower != moved.log


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
    "gmpo": _gmpo,
    "dppo": _dppo,
    "reinforce": _reinforce,
    "quadratic": _quadratic,
    "topr": _topr,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


def selected_by_covariance(
    advantages: Tensor, logprobs: Tensor, mask: Tensor, *, share: float, low: float, high: float, drawn: Tensor | None
) -> Tensor:
    """Tokens by ``(A - mean A) (log p - mean log p)``: bool[total], False outside the mask.

    Of the masked tokens with a covariance inside ``(low, high)``: the share (at least one) with the smallest numbers
    ``drawn`` [total], or, where that is None, with the largest covariances.
    """
    chosen = torch.zeros_like(mask)
    if not bool(mask.any()):
        return chosen
    a, p = advantages.double(), logprobs.double()
    covariance = (a - a[mask].mean()) * (p - p[mask].mean())
    among = (mask & (covariance > low) & (covariance < high)).nonzero().squeeze(-1)
    count = min(len(among), max(1, int(share * int(mask.sum()))))
    order = covariance[among].neg() if drawn is None else drawn[among]
    chosen[among[order.argsort(stable=True)[:count]]] = True
    return chosen


def drawn_numbers(seeds: Tensor, lengths: Tensor) -> Tensor:
    """A pseudo-random number i64[total] for each token, of its row's seed i64[rows] and its place in the row alone."""
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    z = seeds[row] + (place + 1) * -7046029254386353131  # splitmix64 (Steele et al. 2014)
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


__all__ = [
    "GATES",
    "anchored",
    "at_level",
    "correction_weights",
    "drawn_numbers",
    "policy_loss",
    "selected_by_covariance",
]
