"""Advantages from rewards: compared within a prompt or a batch, or generalised advantage estimation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ProgramError


class Steps(NamedTuple):
    """The sampled tokens of packed rows: ``token`` i64[steps] in [total], ``row`` and ``at`` i64[steps] in ``paid``.

    ``paid`` f64[rows, longest] is what each step is paid, and 0 past the end of a row; ``count`` i64[rows].
    """

    token: Tensor
    row: Tensor
    at: Tensor
    count: Tensor
    paid: Tensor


def row_of(lengths: Tensor, total: int, device: torch.device) -> Tensor:
    """The row of each packed value: i64[total]."""
    return torch.arange(len(lengths), device=device).repeat_interleave(lengths.to(device), output_size=total)


def steps_of(rewards: Tensor, mask: Tensor, lengths: Tensor, token_rewards: Tensor | None = None) -> Steps:
    """The steps of packed rows; each row's reward is paid at its last one, on top of ``token_rewards`` [total]."""
    device, rows = mask.device, len(lengths)
    token = mask.nonzero().squeeze(-1)
    row = row_of(lengths, len(mask), device)[token]
    count = torch.bincount(row, minlength=rows)
    at = torch.arange(len(token), device=device) - (count.cumsum(0) - count)[row]
    paid = torch.zeros(rows, int(count.max()) if len(token) else 0, dtype=torch.float64, device=device)
    if token_rewards is not None:
        paid[row, at] = token_rewards[token].double()
    ended = (count > 0).nonzero().squeeze(-1)
    paid[ended, count[ended] - 1] += rewards[ended].double()
    return Steps(token, row, at, count, paid)


def to_go(paid: Tensor, discount: float | Tensor) -> Tensor:
    """``g_t = paid_t + discount g_{t+1}`` along the last dim of [rows, longest]; one discount, or one for each row."""
    result, running = torch.zeros_like(paid), paid.new_zeros(len(paid))
    for t in range(paid.shape[1] - 1, -1, -1):  # past the end of a row all is 0, and stays so
        running = paid[:, t] + discount * running
        result[:, t] = running
    return result


def _sums(numbers: Tensor, group: Tensor, count: int) -> Tensor:
    return numbers.new_zeros(count).index_add_(0, group, numbers)


def sizes(group: Tensor, count: int) -> Tensor:
    """How many rows each group has: f64[count]."""
    return _sums(torch.ones(len(group), dtype=torch.float64, device=group.device), group, count)


def centred(
    numbers: Tensor, group: Tensor, count: int, *, leave_one_out: bool = False, weight: Tensor | None = None
) -> Tensor:
    """``x - mean(x)`` within each group: f64[rows] to f64[rows]; exactly 0 where the numbers are equal.

    ``group`` i64[rows] is each row's, in ``0..count-1``; ``weight`` f64[rows] makes it a weighted mean.

    >>> centred(torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64), torch.tensor([0, 0, 1]), 2).tolist()
    [0.5, -0.5, 0.0]
    """
    # Differences to the smallest of the group first: those of equal numbers are exactly 0, and so is their mean.
    low = numbers.new_zeros(count).scatter_reduce_(0, group, numbers, "amin", include_self=False)
    shifted = numbers - low[group]
    size = sizes(group, count)
    if weight is None:
        mean = _sums(shifted, group, count) / size.clamp(min=1)
    else:
        total = _sums(weight, group, count)
        mean = _sums(weight * shifted, group, count) / total.masked_fill(total == 0, 1)
    result = shifted - mean[group]
    return result * (size / (size - 1).clamp(min=1))[group] if leave_one_out else result


def spread(numbers: Tensor, group: Tensor, count: int) -> Tensor:
    """The std of each group with Bessel's correction, f64[count]; 0 for a group of one."""
    squares = _sums(centred(numbers, group, count).square(), group, count)
    return (squares / (sizes(group, count) - 1).clamp(min=1)).sqrt()


def divided(advantages: Tensor, by: Tensor, eps: float) -> Tensor:
    """``a / (by + eps)``, and 0 where ``by`` is 0: there the rows do not differ, or say nothing."""
    return torch.where(by == 0, 0.0, advantages / (by + eps))


def normalised(numbers: Tensor, group: Tensor, count: int, *, eps: float, scale: str = "group") -> Tensor:
    """``(x - mean) / (std + eps)`` within each group, or ``x - mean`` alone with ``scale="none"``: f64[rows]."""
    numbers = numbers.double()
    result = centred(numbers, group, count)
    return result if scale == "none" else divided(result, spread(numbers, group, count)[group], eps)


def factored(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    group: Tensor,
    count: int,
    *,
    of: str = "rewards",
    token_rewards: Tensor | None = None,
    baseline: Tensor | None = None,
    center: str = "group",
    leave_one_out: bool = False,
    scale: str = "group",
    eps: float = 1e-4,
    whiten: bool = False,
    gamma: float = 1.0,
) -> Tensor:
    """Advantages f64[total] of packed rows. See :func:`flowrl.rl.advantages`.

    ``rewards`` and ``baseline`` [rows], ``mask`` bool and ``token_rewards`` [total], ``lengths`` and ``group``
    i64[rows].
    """
    number, row = rewards.double(), row_of(lengths, len(mask), mask.device)
    later = number.new_zeros(len(mask))  # how far a token's return lies above that of the row's first step
    if of == "returns":
        steps = steps_of(rewards, mask, lengths, token_rewards)
        returns = to_go(steps.paid, gamma)
        if len(steps.token):
            number = torch.where(steps.count > 0, returns[:, 0], number)
        later[steps.token] = returns[steps.row, steps.at] - number[steps.row]
    elif of == "total" and token_rewards is not None:
        number = number + _sums(token_rewards.double() * mask, row, len(lengths))
    if baseline is not None:
        number = number - baseline.double()

    together = (group, count)
    everyone = (torch.zeros_like(group), 1)
    result = number
    if center != "none":
        among = everyone if center == "batch" else together
        weight = _sums(mask.double(), row, len(lengths)) if center == "optimal" else None
        result = centred(number, *among, leave_one_out=leave_one_out, weight=weight)
        later = later * (sizes(*among) > 1)[among[0]][row]  # a row with nothing to compare it with has 0
    result = later + result[row]
    if scale in ("group", "batch"):
        among = everyone if scale == "batch" else together
        result = divided(result, spread(number, *among)[among[0]][row], eps)
    elif scale == "mean":
        result = divided(result, _positive_mean(number, group, count)[group][row], eps)
    if not whiten:
        return result * mask
    chosen = result[mask]
    return whitened(result - chosen.min(), mask) if len(chosen) else result * mask


def _positive_mean(numbers: Tensor, group: Tensor, count: int) -> Tensor:
    low = float(numbers.min()) if len(numbers) else 0.0
    if low < 0:
        raise ProgramError(
            f"rl.advantages: scale='mean' is for rewards of 0 and above, and the smallest is {low:g}.",
            fix='Shift the rewards, or write scale="group".',
        )
    return _sums(numbers, group, count) / sizes(group, count).clamp(min=1)


def generalised(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_returns: float | None = None,
    alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, f32[total] each, of packed rows; only masked tokens are steps. See :func:`flowrl.rl.gae`.

    ``rewards`` [rows]; ``values``, ``mask`` and ``token_rewards`` [total]; ``lengths`` i64[rows].
    """
    steps = steps_of(rewards, mask, lengths, token_rewards)
    value = steps.paid.new_zeros(len(lengths), steps.paid.shape[1] + 1)
    value[steps.row, steps.at] = values[steps.token].double()
    errors = steps.paid + gamma * value[:, 1:] - value[:, :-1]
    by_row = lam if alpha is None else adapted(steps.count, alpha)
    estimate = to_go(errors, gamma * by_row)
    advantages = torch.zeros(len(values), dtype=torch.float32, device=values.device)
    advantages[steps.token] = estimate[steps.row, steps.at].float()
    if lam_returns is not None:
        estimate = to_go(errors, gamma * lam_returns)
    returns = values.float().clone()
    returns[steps.token] = (estimate + value[:, :-1])[steps.row, steps.at].float()
    return advantages, returns


def adapted(count: Tensor, alpha: float) -> Tensor:
    """``1 - 1 / (alpha n)`` for rows of ``n`` sampled tokens, 0 where that is below 0: f64[rows].

    The weights of a row's later errors then add up to ``alpha n``.

    >>> adapted(torch.tensor([0, 10, 40, 200]), 0.05)
    tensor([0.0000, 0.0000, 0.5000, 0.9000], dtype=torch.float64)
    """
    return (1 - 1 / (alpha * count.double().clamp(min=1))).clamp(min=0)


def whitened(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``(a - mean) / (std + eps)`` over the masked tokens of [total], 0 elsewhere; no Bessel's correction."""
    chosen = advantages[mask].double()
    if not len(chosen):
        return advantages
    centred = chosen - chosen.mean()
    result = torch.zeros_like(advantages)
    result[mask] = (centred / (centred.square().mean().sqrt() + eps)).to(advantages.dtype)
    return result
