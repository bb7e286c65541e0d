"""The weight ``w`` of a policy loss: a product of factors, each of one part; see :mod:`flowrl.rl.corrections`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..corrections import SAMPLERS, Correction, Part, Rejection, Weights, ratio_names
from ..loss_spec import LossInputs
from .kl import estimate, guarded
from .ratio import anchored, at_level


def correction_weights(x: LossInputs, corrections: Sequence[Part], anchor: str) -> Tensor:
    """The product of the corrections' factors [total], without gradient."""
    return weights_and_ratios(x, corrections, anchor)[0]


def weights_and_ratios(x: LossInputs, corrections: Sequence[Part], anchor: str) -> tuple[Tensor, dict[str, Tensor]]:
    """What :func:`correction_weights` gives; and of each ratio among the factors what it is before its bounds.

    That is ``correction_ratio``, and as ``correction_beyond`` whether it is beyond them, 0 or 1; [total] each.
    """
    weight, ratios = torch.ones_like(x.predicted.detach()), dict[str, Tensor]()
    names = ratio_names(corrections)
    for part in corrections:
        if isinstance(part, Weights):
            factor = x[part.field]
        elif isinstance(part, Rejection):
            factor = kept(x, part, anchor)
        else:
            w, inside = ratio_and_place(x, part, anchor)
            factor, name = bounded(w, inside, part), names[len(ratios) // 2]
            ratios |= {f"{name}_ratio": w, f"{name}_beyond": (~inside).to(w.dtype)}
        weight = weight * factor
    return weight, ratios


def ratio_and_place(x: LossInputs, part: Correction, anchor: str) -> tuple[Tensor, Tensor]:
    """``w`` of the anchor to the policy that sampled, before any bound, and whether it is inside them [total].

    With a veto all tokens of a row are outside where one is.
    """
    moved = guarded(_nearer(x, anchor) - _sampled(x, anchor))
    w = at_level(x, moved, part.level).exp()
    if part.how == "veto":
        least = math.log(part.low) if part.low else -math.inf
        bad = x.row_sum((moved < least).to(moved.dtype)) > 0
        return w, (~bad)[x.row]
    return w, (w >= part.low) & (w <= part.high)


def bounded(w: Tensor, inside: Tensor, part: Correction) -> Tensor:
    """The factor that a part makes of its ratio [total]."""
    factors = {
        "weigh": w,
        "truncate": w.clamp(max=part.high),
        "clip": w.clamp(part.low, part.high),
        "mask": w * inside,
    }
    return factors.get(part.how, inside)


def kept(x: LossInputs, part: Rejection, anchor: str) -> Tensor:
    """Whether each token's divergence, or its row's, is at most the limit: bool[total]."""
    nearer, sampled = _nearer(x, "rollout" if part.of == "policy" else anchor), _sampled(x, anchor)
    if part.divergence == "tv":
        found = (nearer.exp() - sampled.exp()).abs().nan_to_num(nan=0.0)
    else:
        found = estimate(sampled, nearer, part.divergence)
    near = _over_rows(x, found, part.level) <= part.limit
    return near | (x["advantages"] >= 0) if part.negative else near


def _nearer(x: LossInputs, anchor: str) -> Tensor:
    """Log-probabilities that are held against the sampler's: the anchor's, or the policy's where that sampled."""
    return x.predicted.detach() if anchor in SAMPLERS else anchored(x, anchor)


def _sampled(x: LossInputs, anchor: str) -> Tensor:
    """Log-probabilities of the policy that sampled, of the distribution that the anchor is of."""
    return x["sampling_logprobs" if anchor == "sampling" else "rollout_logprobs"]


def _over_rows(x: LossInputs, found: Tensor, level: str) -> Tensor:
    """Of each token its own number, or of its row's masked tokens the sum, the mean or the largest [total]."""
    if level == "token":
        return found
    if level == "max":
        held = found.masked_fill(~x.mask, -math.inf)
        rows = held.new_full((len(x.lengths),), -math.inf)
        return rows.scatter_reduce_(0, x.row, held, "amax")[x.row]
    return (x.row_sum(found) if level == "sequence" else x.row_mean(found))[x.row]


def normalized(x: LossInputs, weights: Tensor, over: str) -> Tensor:
    """The weights [total] divided by their mean over ``tokens``, or over ``rows`` of a row's mean; ``none``: as is."""
    if over == "none":
        return weights
    held = x.row_count() > 0
    mean = weights[x.mask].mean() if over == "tokens" else x.row_mean(weights)[held].mean()
    return weights / mean if bool(mean > 1e-8) else weights  # no number where there is no token
