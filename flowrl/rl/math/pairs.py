"""Which rows of a prompt are kept, and responses under prompts that are not theirs: on packed tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import row_of


def ranked(numbers: Tensor, group: Tensor, order: Tensor) -> Tensor:
    """Rows sorted by their group, in it the largest number first, ties in ``order``: i64[rows].

    ``numbers`` [rows]; ``group`` i64[rows]; ``order`` i64[rows]: all rows, in the order of their keys.

    >>> ranked(torch.tensor([1.0, 3.0, 3.0, 9.0]), torch.tensor([0, 0, 0, 1]), torch.arange(4)).tolist()
    [1, 2, 0, 3]
    """
    order = order[numbers[order].argsort(descending=True, stable=True)]
    return order[group[order].argsort(stable=True)]


def best(numbers: Tensor, group: Tensor, order: Tensor, k: int) -> Tensor:
    """The ``k`` rows of each group with the largest numbers, which are not nan: bool[rows]. See :func:`ranked`."""
    usable = ~numbers.isnan()
    rows = ranked(numbers, group, order[usable[order]])
    start = torch.searchsorted(group[rows], group[rows])  # where the group of each begins
    kept = torch.zeros(len(numbers), dtype=torch.bool)
    kept[rows[torch.arange(len(rows)) - start < k]] = True
    return kept


def extremes(numbers: Tensor, group: Tensor, order: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """The best and the worst ``usable`` row of each group, where they differ: bool[rows] each. See :func:`ranked`."""
    numbers = torch.where(usable, numbers, torch.nan)
    high, low = best(numbers, group, order, 1), best(-numbers, group, order, 1)
    return high & ~low, low & ~high


def parted(values: Tensor, lengths: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """A packed ragged column as two: the last ``ends`` of each row, and what stands before them."""
    starts = (lengths.cumsum(0) - ends).to(values.device)
    row = row_of(lengths, len(values), values.device)
    behind = torch.arange(len(values), device=values.device) >= starts[row]
    return values[~behind], values[behind]


def packed_together(first: Tensor, first_lengths: Tensor, second: Tensor, second_lengths: Tensor) -> Tensor:
    """Two packed ragged columns, row by row one behind the other: [total]."""
    out = first.new_empty(len(first) + len(second))
    starts = (first_lengths + second_lengths).cumsum(0) - first_lengths - second_lengths
    for values, lengths, at in ((first, first_lengths, starts), (second, second_lengths, starts + first_lengths)):
        row = row_of(lengths, len(values), out.device)
        shift = (at - lengths.cumsum(0) + lengths).to(out.device)
        out[torch.arange(len(values), device=out.device) + shift[row]] = values.to(out.device)
    return out
