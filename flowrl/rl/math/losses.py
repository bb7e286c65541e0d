"""Losses per token: pure functions of :class:`flowrl.rl.LossInputs`. ``aggregate`` makes one number of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ProgramError
from ..loss_spec import LossInputs


def value_clip(x: LossInputs, *, clip: float | None = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """``max((V - R)^2, (V_clipped - R)^2) / 2`` [total]; see :func:`flowrl.rl.value_clip`."""
    returns, before = x["returns"], x["values"]
    square = (x.predicted - returns).square()
    reports = {"value_error": square.detach()}
    if clip is None:
        return square / 2, reports
    near = before + (x.predicted - before).clamp(-clip, clip)
    held = (near - returns).square()
    reports["value_clip_fraction"] = (held > square).to(square.dtype).detach()
    return torch.maximum(square, held) / 2, reports


def sft(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """``-log p`` [total]."""
    return -x.predicted, {}


def token_weights(
    mask: Tensor, row: Tensor, rows: int, aggregate: str, norm: float | None = None, group: Tensor | None = None
) -> Tensor:
    """The weight of each token in the loss of a whole mini-batch, so that ``loss = sum(weights * per_token)``.

    ``mask`` bool[total], ``row`` i64[total]; gives f64[total], 0 outside the mask. Rows without a masked token do not
    count as rows. ``norm``: the tokens that ``seq-mean-token-sum-norm`` divides each row's sum by. ``group`` i64[rows]:
    rows of one prompt have the same number, for ``prompt-mean``. Raises ProgramError for an unknown ``aggregate``.

    >>> token_weights(torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 2]), 3, "seq-mean-token-mean")
    tensor([0.2500, 0.2500, 0.0000, 0.5000], dtype=torch.float64)
    """
    one = mask.double()
    if aggregate == "token-sum":
        return one
    if aggregate == "token-mean":
        return one / one.sum().clamp(min=1)
    if aggregate == "prompt-mean" and group is not None:  # a prompt's rows are one long row
        return token_weights(mask, group[row], int(group.max()) + 1 if rows else 0, "seq-mean-token-mean")
    tokens = torch.zeros(rows, dtype=one.dtype, device=one.device).index_add_(0, row, one)
    filled = (tokens > 0).sum().clamp(min=1)
    if aggregate == "seq-mean-token-sum":
        return one / filled
    if aggregate == "seq-mean-token-sum-norm" and norm:
        return one / (filled * float(norm))
    if aggregate == "seq-mean-token-mean":
        return one / tokens.clamp(min=1)[row] / filled
    raise ProgramError(f"'{aggregate}' is no way to aggregate a loss.")


def row_weights(counted: Tensor, aggregate: str) -> Tensor:
    """The weight of each row in a loss per row: f64[rows], 0 for rows that ``counted`` bool[rows] leaves out.

    >>> row_weights(torch.tensor([True, False, True]), "row-mean")
    tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64)
    """
    one = counted.double()
    if aggregate == "row-sum":
        return one
    if aggregate == "row-mean":
        return one / one.sum().clamp(min=1)
    raise ProgramError(f"'{aggregate}' is no way to aggregate a loss per row.")
