"""Losses per row on what is preferred: pure functions of :class:`flowrl.rl.LossInputs`. See ``rl/preference.py``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ProgramError
from ..loss_spec import LossInputs
from .kl import BOUND

#: Log-probabilities and log-ratios of a token beyond this count as this, and have no gradient.
FURTHEST = 1000.0


def pairs_of(x: LossInputs, name: str) -> tuple[Tensor, Tensor]:
    """The better and the worse row of each prompt, i64[pairs] each, in the order of ``x.group``.

    Raises ProgramError, in the name of the loss, where a prompt has not exactly one row of each kind.
    """
    assert x.group is not None, "a loss that compares rows is told which belong together"
    group, preferred = x.group, x.fields["preferred"].bool()
    count = int(group.max()) + 1 if len(group) else 0
    chosen, others = preferred.nonzero().squeeze(-1), (~preferred).nonzero().squeeze(-1)
    found = [torch.bincount(group[rows], minlength=count) for rows in (chosen, others)]
    odd = int(((found[0] != 1) | (found[1] != 1)).sum())
    if odd:
        raise ProgramError(
            f"rl.{name}: {odd} of {count} prompts have not exactly one preferred row and one other.",
            fix="Make pairs with rl.pairs(batch); a row without a token to train on does not count.",
        )
    better, worse = (group.new_zeros(count).scatter_(0, group[rows], rows) for rows in (chosen, others))
    return better, worse


def log_ratios(x: LossInputs) -> Tensor:
    """``log p - log p_ref`` of each token, with gradient: [total]; 0 between two probabilities of 0."""
    return _held(x.predicted - x["ref_logprobs"].to(x.predicted.dtype))


def _held(tokens: Tensor) -> Tensor:
    return torch.nan_to_num(tokens, nan=0.0, posinf=FURTHEST, neginf=-FURTHEST).clamp(-FURTHEST, FURTHEST)


def _compared(x: LossInputs, rewards: Tensor, better: Tensor, worse: Tensor) -> dict[str, Tensor]:
    """What a pair's rewards [rows] say, given to each of its rows: [rows] each."""
    high, low = rewards.detach()[better], rewards.detach()[worse]
    pairs = {
        "reward_margin": high - low,
        "reward_accuracy": (high > low).to(high.dtype),
        "chosen_reward": high,
        "rejected_reward": low,
    }
    return {name: value[x.group] for name, value in pairs.items()}


def pair_loss(
    kind: str,
    high: Tensor,
    low: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    tau: float = 0.05,
) -> Tensor:
    """The loss of pairs from ``h`` of the better row and of the worse one, [pairs] each. See ``rl.preference_loss``.

    >>> one = torch.tensor([2.0])
    >>> pair_loss("hinge", one, -one, beta=0.1), pair_loss("sppo", one, -one, beta=0.5)
    (tensor([0.6000]), tensor([2.]))
    """
    up, down, s = beta * high, beta * low, label_smoothing
    m = up - down - margin
    match kind:
        case "sigmoid":
            return -(1 - s) * F.logsigmoid(m) - s * F.logsigmoid(-m)
        case "robust":
            return (-(1 - s) * F.logsigmoid(m) + s * F.logsigmoid(-m)) / (1 - 2 * s)
        case "hinge":
            return F.relu(1 - m)
        case "exo":
            better, worse = F.logsigmoid(m), F.logsigmoid(-m)
            return better.exp() * (better - math.log1p(-s)) + worse.exp() * (worse - math.log(s))
        case "discopop":
            share = torch.sigmoid(m / tau)
            return share * (-m.clamp(min=-BOUND)).exp() - (1 - share) * F.logsigmoid(m)
        case "ipo":
            return (high - low - 1 / (2 * beta)).square()
        case "sppo":
            return (high - 1 / (2 * beta)).square() + (low + 1 / (2 * beta)).square()
        case "nca":
            return -F.logsigmoid(up) - (F.logsigmoid(-up) + F.logsigmoid(-down)) / 2
        case "bco":
            return -F.logsigmoid(up) - F.logsigmoid(-down)
        case "apo_zero":
            return torch.sigmoid(-up) + torch.sigmoid(down)
        case "apo_down":
            return torch.sigmoid(up) + torch.sigmoid(down - up)
    raise ProgramError(f"'{kind}' is no loss of pairs.")


def _pairwise(
    x: LossInputs,
    name: str,
    kind: str,
    *,
    beta: float,
    reference_free: bool = False,
    average: bool = False,
    nll: float = 0.0,
    **shape: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each pair at both of its rows [rows], and what it reports; ``shape`` is for :func:`pair_loss`."""
    better, worse = pairs_of(x, name)
    tokens = _held(x.predicted) if reference_free else log_ratios(x)
    moved = x.row_mean(tokens) if average else x.row_sum(tokens)
    loss = pair_loss(kind, moved[better], moved[worse], beta=beta, **shape)
    reports = _compared(x, beta * moved, better, worse)
    if nll:
        likely = -x.row_mean(_held(x.predicted))[better]
        loss = loss + nll * likely
        reports = {"nll": likely.detach()[x.group], **reports}
    return loss[x.group], reports


def preference_loss(x: LossInputs, *, kind: str, **parts: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Any kind with any parts, at both rows of each pair [rows]; see :func:`flowrl.rl.preference_loss`."""
    return _pairwise(x, "preference_loss", kind, **parts)


def dpo(x: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """``-(1 - s) log sigmoid(m) - s log sigmoid(-m)`` of each pair, at both of its rows [rows]."""
    return _pairwise(x, "dpo", "sigmoid", beta=beta, label_smoothing=label_smoothing)


def ipo(x: LossInputs, *, beta: float = 0.1, average: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """``(h - 1 / (2 beta))^2`` of each pair, at both of its rows [rows]."""
    return _pairwise(x, "ipo", "ipo", beta=beta, average=average)


def simpo(x: LossInputs, *, beta: float = 2.0, margin: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """``-log sigmoid(beta (m_w - m_l) - margin)`` of each pair, at both of its rows [rows]."""
    return _pairwise(x, "simpo", "sigmoid", beta=beta, margin=margin, reference_free=True, average=True)


def cpo(
    x: LossInputs, *, beta: float = 0.1, nll: float = 1.0, label_smoothing: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-log sigmoid(beta (log p_w - log p_l)) - nll log p_w`` of each pair, at both of its rows [rows]."""
    return _pairwise(x, "cpo", "sigmoid", beta=beta, nll=nll, label_smoothing=label_smoothing, reference_free=True)


def orpo(x: LossInputs, *, weight: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """``-m_w - weight log sigmoid(log odds(w) - log odds(l))`` of each pair, at both of its rows [rows]."""
    better, worse = pairs_of(x, "orpo")
    mean = x.row_mean(_held(x.predicted))
    odds = log_odds(mean)
    margin = odds[better] - odds[worse]
    loss = -mean[better] - weight * F.logsigmoid(margin)
    reports = {"nll": -mean.detach()[better][x.group], "log_odds": margin.detach()[x.group]}
    return loss[x.group], reports | _compared(x, mean, better, worse)


def log_odds(logprobs: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of log-probabilities, in their shape; from 20 on it is 20, without gradient.

    >>> log_odds(torch.tensor([0.75], dtype=torch.float64).log()).exp().round(decimals=9)
    tensor([3.], dtype=torch.float64)
    """
    low = -math.log1p(math.exp(-BOUND))  # where the odds are exp(20)
    certain = logprobs >= low
    inside = torch.where(certain, low, logprobs)
    return torch.where(certain, BOUND, inside - (-torch.expm1(inside)).log())


def kto(
    x: LossInputs,
    *,
    beta: float = 0.1,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    reference_point: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``w (1 - sigmoid(+-beta (h - z0)))`` of each row [rows]."""
    preferred = x.fields["preferred"].bool()
    moved = x.row_sum(log_ratios(x))
    above = beta * (moved - max(0.0, float(reference_point)))
    loss = torch.where(preferred, desirable * torch.sigmoid(-above), undesirable * torch.sigmoid(above))
    right = torch.where(preferred, above > 0, above < 0)
    return loss, {"reward": beta * moved.detach(), "reward_accuracy": right.to(loss.dtype)}


def bradley_terry(x: LossInputs, *, margin: str | None = None, center: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """``-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2`` of each pair, at both of its rows [rows]."""
    better, worse = pairs_of(x, "bradley_terry")
    high, low = x.predicted[better], x.predicted[worse]
    above = high - low
    asked = above if margin is None else above - x.fields[margin].to(above.dtype)[better]
    loss = -F.logsigmoid(asked) + center * (high + low).square()
    above = above.detach()
    return loss[x.group], {"accuracy": (above > 0).to(above.dtype)[x.group], "margin": above[x.group]}
