"""Rows by their numbers, with the same gradient each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def take_rows(values: Tensor, at: Tensor) -> Tensor:
    """``values[at]`` for ``values`` [rows, ...] and ``at`` i64[n]; what a row gets of the gradient is added up in the
    order of ``at``.

    On a CPU the gradient of ``values[at]`` is added up by several threads, as they come: rounding differs from one
    time to the next where a number is there three times or more. On a device it is sorted first.

    >>> import torch
    >>> take_rows(torch.tensor([0.5, 2.0]), torch.tensor([1, 1, 0]))
    tensor([2.0000, 2.0000, 0.5000])
    """
    return values.index_select(0, at) if values.device.type == "cpu" else values[at]
