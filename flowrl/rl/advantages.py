"""Advantages from rewards: normalised within a prompt's group, or generalised advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor


def group_normalised(
    rewards: Tensor,
    group: Tensor,
    count: int,
    *,
    scale: str = "std",
    eps: float = 1e-4,
    leave_one_out: bool = False,
) -> Tensor:
    """``(r - mean) / (std + eps)`` within each group: ``rewards`` [rows] to f32[rows].

    ``group`` i64[rows] is each row's, in ``0..count-1``. The std has Bessel's correction. A group of one gives 0, and
    equal rewards give exactly 0.

    >>> group_normalised(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), 2, scale="none")
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    exact = rewards.double()
    size = torch.zeros(count, dtype=exact.dtype, device=exact.device).index_add_(0, group, torch.ones_like(exact))
    # Differences to the smallest of the group first: those of equal rewards are exactly 0, and so is their mean.
    anchor = torch.zeros_like(size).scatter_reduce_(0, group, exact, "amin", include_self=False)
    shifted = exact - anchor[group]
    mean = torch.zeros_like(size).index_add_(0, group, shifted) / size.clamp(min=1)
    centred = shifted - mean[group]
    others = (size - 1).clamp(min=1)
    result = centred * (size / others)[group] if leave_one_out else centred
    if scale == "std":
        variance = torch.zeros_like(size).index_add_(0, group, centred.square()) / others
        result = result / (variance.sqrt() + eps)[group]
    return result.float()


def generalised(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, f32[total] each, of packed rows; only masked tokens are steps. See :func:`flowrl.rl.gae`.

    ``rewards`` [rows]; ``values``, ``mask`` and ``token_rewards`` [total]; ``lengths`` i64[rows].
    """
    device, rows = values.device, len(lengths)
    step = mask.nonzero().squeeze(-1)
    row = torch.arange(rows, device=device).repeat_interleave(lengths.to(device), output_size=len(values))[step]
    steps = torch.bincount(row, minlength=rows)
    first = steps.cumsum(0) - steps
    at = torch.arange(len(step), device=device) - first[row]  # the step's number in its row
    width = int(steps.max()) if len(step) else 0

    value = torch.zeros(rows, width + 1, dtype=torch.float64, device=device)
    value[row, at] = values[step].double()
    reward = torch.zeros(rows, width, dtype=torch.float64, device=device)
    if token_rewards is not None:
        reward[row, at] = token_rewards[step].double()
    ended = (steps > 0).nonzero().squeeze(-1)
    reward[ended, steps[ended] - 1] += rewards[ended].double()

    delta = reward + gamma * value[:, 1:] - value[:, :-1]
    estimate = torch.zeros_like(reward)
    running = torch.zeros(rows, dtype=torch.float64, device=device)
    for t in range(width - 1, -1, -1):  # past the end of a row all is 0, and stays so
        running = delta[:, t] + gamma * lam * running
        estimate[:, t] = running
    advantages = torch.zeros(len(values), dtype=torch.float32, device=device)
    advantages[step] = estimate[row, at].float()
    returns = values.float().clone()
    returns[step] = (estimate + value[:, :-1])[row, at].float()
    return advantages, returns


def whitened(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``(a - mean) / (std + eps)`` over the masked tokens of [total], 0 elsewhere; no Bessel's correction."""
    chosen = advantages[mask].double()
    if not len(chosen):
        return advantages
    centred = chosen - chosen.mean()
    result = torch.zeros_like(advantages)
    result[mask] = (centred / (centred.square().mean().sqrt() + eps)).to(advantages.dtype)
    return result
