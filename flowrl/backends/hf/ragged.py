"""Index arithmetic on packed rows: where the elements of some rows lie, and how to pad them."""

from __future__ import annotations

import torch
from torch import Tensor


def starts_of(lengths: Tensor) -> Tensor:
    """Where each row begins: ``[3, 0, 2]`` gives ``[0, 3, 3]``."""
    return lengths.cumsum(0) - lengths


def ragged_index(starts: Tensor, lengths: Tensor) -> Tensor:
    """``starts[i] .. starts[i] + lengths[i] - 1`` of every row i, one row after the other: i64[sum of lengths].

    >>> ragged_index(torch.tensor([10, 20]), torch.tensor([2, 1]))
    tensor([10, 11, 20])
    """
    total = int(lengths.sum())
    shift = torch.repeat_interleave(starts - starts_of(lengths), lengths, output_size=total)
    return shift + torch.arange(total, device=lengths.device)


def padded(values: Tensor, starts: Tensor, lengths: Tensor, width: int, value: int) -> Tensor:
    """Rows of a packed tensor side by side, padded at the end: [rows, width]. ``width`` is the longest's length."""
    at = torch.arange(width, device=values.device)
    inside = at < lengths[:, None]
    return torch.where(inside, values[torch.where(inside, starts[:, None] + at, 0)], value)
