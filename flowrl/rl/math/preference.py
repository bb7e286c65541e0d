"""Losses per row on what is preferred: pure functions of :class:`flowrl.rl.LossInputs`. See ``rl/preference.py``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ProgramError
from ..spec import LossInputs
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


def dpo(x: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """``-(1 - s) log sigmoid(m) - s log sigmoid(-m)`` of each pair, at both of its rows [rows]."""
    better, worse = pairs_of(x, "dpo")
    rewards = beta * x.row_sum(log_ratios(x))
    margin = rewards[better] - rewards[worse]
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return loss[x.group], _compared(x, rewards, better, worse)


def ipo(x: LossInputs, *, beta: float = 0.1, average: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """``(h - 1 / (2 beta))^2`` of each pair, at both of its rows [rows]."""
    better, worse = pairs_of(x, "ipo")
    moved = x.row_mean(log_ratios(x)) if average else x.row_sum(log_ratios(x))
    loss = (moved[better] - moved[worse] - 1 / (2 * beta)).square()
    return loss[x.group], _compared(x, beta * moved, better, worse)


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
