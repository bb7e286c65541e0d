"""Which tokens of a batch are selected: bool[total], False outside the mask; see ``selection.py`` of ``flowrl.rl``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...splitmix import GOLDEN, mix


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
    return mix(seeds[row] + (place + 1) * GOLDEN)


def selected_by_entropy(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Masked tokens whose entropy is at least the ``1 - share`` quantile of them, interpolated linearly."""
    ordered = entropies[mask].double().sort().values
    if not len(ordered):
        return torch.zeros_like(mask)
    place = (1 - share) * (len(ordered) - 1)
    below = int(place)
    least = ordered[below].lerp(ordered[min(below + 1, len(ordered) - 1)], place - below)
    return mask & (entropies.double() >= least)


def selected_by_second_moment(moved: Tensor, among: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Masked tokens without the largest ``moved^2`` of those ``among``, so that the mean of theirs is below ``limit``.

    Equal ones go together. The smallest stay, also where their mean is not below.
    """
    among = among & mask
    square = moved.double().square()
    ordered = square[among].sort().values
    if not len(ordered):
        return mask.clone()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last = torch.ones_like(ordered, dtype=torch.bool)  # of those that are equal
    last[:-1] = ordered[:-1] < ordered[1:]
    kept = ordered[last & (means < limit)]
    return mask & (~among | (square <= (kept[-1] if len(kept) else ordered[0])))
