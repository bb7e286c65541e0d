"""Penalties by length, and rewards clipped or whitened: pure functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import centred, row_of


def sampled(mask: Tensor, lengths: Tensor) -> Tensor:
    """The number of masked tokens of each packed row: f64[rows]."""
    none = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device)
    return none.index_add_(0, row_of(lengths, len(mask), mask.device), mask.double())


def overlong(length: Tensor, longest: int, buffer: int) -> Tensor:
    """0 up to ``longest - buffer`` tokens, then falling to -1 at ``longest``: f64[rows].

    >>> overlong(torch.tensor([6.0, 9.0, 12.0]), longest=10, buffer=4).tolist()
    [0.0, -0.75, -1.0]
    """
    return ((longest - buffer - length.double()) / buffer).clamp(-1, 0)


def by_length(length: Tensor, correct: Tensor, group: Tensor, count: int) -> Tensor:
    """``1/2 - (n - min) / (max - min)`` within each group, at most 0 for wrong answers: f64[rows]."""
    ends = [
        length.new_zeros(count).scatter_reduce_(0, group, length, how, include_self=False)[group]
        for how in ("amin", "amax")
    ]
    short, width = ends[0], ends[1] - ends[0]
    place = 0.5 - (length - short) / width.clamp(min=1)
    return torch.where(width > 0, torch.where(correct, place, place.clamp(max=0)), 0.0)


def whitened(rewards: Tensor, *, shift: bool, eps: float = 1e-8) -> Tensor:
    """``(r - mean) / (std + eps)`` over all of [rows], plus the mean again unless ``shift``; no Bessel's correction."""
    exact = rewards.double()
    if not len(exact):
        return exact
    away = centred(exact, torch.zeros(len(exact), dtype=torch.int64, device=exact.device), 1)
    result = away / (away.square().mean().sqrt() + eps)
    return result if shift else result + exact.mean()
