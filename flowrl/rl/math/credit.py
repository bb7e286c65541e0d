"""Advantages that give credit more finely than by a row's one reward: by reward, by token, by turn."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

from ...errors import ProgramError
from .advantages import centred, divided, normalised, row_of, steps_of, to_go


def decoupled(rewards: Sequence[Tensor], weights: Sequence[float], group: Tensor, count: int, eps: float) -> Tensor:
    """Each of the rewards [rows] normalised by group, their weighted sum normalised over all: f64[rows].

    See :func:`flowrl.rl.gdpo`.
    """
    parts = [w * normalised(r, group, count, eps=eps) for r, w in zip(rewards, weights, strict=True)]
    return normalised(torch.stack(parts).sum(0), torch.zeros_like(group), 1, eps=eps)


def best_of_sets(rewards: Tensor, group: Tensor, count: int, *, k: int, scale: str, eps: float) -> Tensor:
    """How much more the best of ``k`` rows of a prompt earns with this row among them: f64[rows].

    All sets of ``k`` rows count alike, and none is drawn. See :func:`flowrl.rl.pass_at_k`.
    """
    numbers, sizes = rewards.double(), torch.bincount(group, minlength=count)
    rising = torch.argsort(numbers, stable=True)
    rising = rising[torch.argsort(group[rising], stable=True)]  # by prompt, the rewards of each rising
    first = sizes.cumsum(0) - sizes
    result = torch.zeros_like(numbers)
    for n in sizes.unique().tolist():
        if n <= k:  # one set at most: there is nothing to compare it with
            continue
        rows = rising[first[sizes == n][:, None] + torch.arange(n, device=group.device)]
        # Differences to the smallest that can be the best of k: where no set differs from another, all are exactly 0.
        paid = numbers[rows] - numbers[rows[:, k - 1]][:, None]
        every, own, other = _shares_of_the_best(n, k, paid)
        mean = (every * paid).sum(1, keepdim=True)
        later = (other * paid).flip(1).cumsum(1).flip(1) - other * paid  # of better rows, that one of them is the best
        found = own * paid + later - mean
        if scale != "none":
            found = divided(found, (every * (paid - mean).square()).sum(1, keepdim=True).sqrt(), eps)
        result[rows] = found
    return result


def _shares_of_the_best(n: int, k: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``n`` rows by rising reward, how often each is the best of a set of ``k``: [n] each.

    Over all sets; over those that it is in; and over those that a row with a smaller reward is in.
    """
    sets, mine = comb(n, k), comb(n - 1, k - 1)
    every = [comb(j, k - 1) / sets for j in range(n)]
    own = [comb(j, k - 1) / mine for j in range(n)]
    other = [comb(j - 1, k - 2) / mine if k > 1 and j > 0 else 0.0 for j in range(n)]
    return like.new_tensor(every), like.new_tensor(own), like.new_tensor(other)


def against_optimal_token(
    rewards: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    group: Tensor,
    count: int,
    *,
    token_rewards: Tensor | None = None,
    sum_squares: Tensor | None = None,
) -> Tensor:
    """``G_t - B_t`` of packed rows, f64[total]. See :func:`flowrl.rl.optimal_token_baseline`.

    ``rewards`` [rows]; ``logprobs``, ``mask``, ``token_rewards`` and ``sum_squares`` [total]; ``group`` i64[rows].
    """
    steps = steps_of(rewards, mask, lengths, token_rewards)
    result = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    if not len(steps.token):
        return result
    returns = to_go(steps.paid, 1.0)[steps.row, steps.at]
    p = logprobs[steps.token].double().exp()
    norm = 1 - p if sum_squares is None else 1 - 2 * p + sum_squares[steps.token].double()
    energy = torch.zeros_like(steps.paid)
    energy[steps.row, steps.at] = norm.clamp(min=0)
    energy = energy.cumsum(1)[steps.row, steps.at]
    # The rows of a prompt that have a t-th sampled token are one cell; where none of them weighs, all weigh the same.
    width = steps.paid.shape[1]
    cell, cells = group[steps.row] * width + steps.at, count * width
    whole = energy.new_zeros(cells).index_add_(0, cell, energy)
    weight = torch.where(whole[cell] > 0, energy, 1.0)
    result[steps.token] = centred(returns, cell, cells, weight=weight)
    return result


def in_groups_in_groups(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    turn_rewards: Tensor,
    turn_states: Tensor,
    turn_lengths: Tensor,
    turn_ids: Tensor,
    group: Tensor,
    count: int,
    *,
    weight: float,
    gamma: float,
    scale: str,
    eps: float,
    op: str = "rl.gigpo",
) -> Tensor:
    """Episode advantage plus ``weight`` times step advantage, f64[total]. See :func:`flowrl.rl.gigpo`.

    ``rewards`` and ``group`` [rows]; ``mask`` and ``turn_ids`` [total], ``lengths`` i64[rows]; ``turn_rewards`` and
    ``turn_states`` [turns], ``turn_lengths`` i64[rows]. ``op`` is what an error names.
    """
    how = "none" if scale == "none" else "group"
    episode = normalised(rewards, group, count, eps=eps, scale=how)

    nothing, every = torch.zeros_like(rewards), torch.ones_like(turn_states, dtype=torch.bool)
    steps = steps_of(nothing, every, turn_lengths, turn_rewards)
    returns = to_go(steps.paid, gamma)[steps.row, steps.at]
    anchors = torch.stack([group[steps.row], turn_states.to(group.dtype)], dim=1)
    found, anchor = torch.unique(anchors, dim=0, return_inverse=True)
    step = normalised(returns, anchor, len(found), eps=eps, scale=how)

    row = row_of(lengths, len(mask), mask.device)
    turns = turn_lengths.to(mask.device)
    _check_turns(op, turn_ids, mask, turns[row])
    place = ((turns.cumsum(0) - turns)[row] + turn_ids)[mask]
    result = episode[row] * mask
    result[mask] += weight * step[place]
    return result


def numbers_of_turns(turn_lengths: Tensor) -> Tensor:
    """The number of each turn in its row, from 0: i64[turns]."""
    first = turn_lengths.cumsum(0) - turn_lengths
    return torch.arange(int(turn_lengths.sum()), device=turn_lengths.device) - first.repeat_interleave(turn_lengths)


def _check_turns(op: str, turn_ids: Tensor, mask: Tensor, turns: Tensor) -> None:
    wrong = (mask & ((turn_ids < 0) | (turn_ids >= turns))).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise ProgramError(
            f"{op}: a sampled token belongs to turn {int(turn_ids[token])} of a row of {int(turns[token])} turns.",
            fix="Count the turns of a row from 0 in turn_ids, and give -1 only to tokens outside response_mask.",
        )
