"""Weights of one engine taken by another of the same model, part by part where ranks have parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ModelError
from ...workers.weights.weight_boxes import Shard
from .parameters import Parameters

#: In which an average of weights moves by small steps.
_WIDE = (torch.float32, torch.float64)


def copy(mine: Parameters, given: Sequence[Shard], titles: tuple[str, str]) -> None:
    """Take the given weights. ``titles`` are those of the models, for messages. Raises as :func:`fitting`."""
    with torch.no_grad():
        for shard, weight in fitting(mine, given, titles):
            shard.tensor.copy_(weight)
    mine.since = "since the weights of another copy were taken over"
    mine.written()


def blend(mine: Parameters, given: Sequence[Shard], titles: tuple[str, str], decay: float) -> float:
    """``w = decay w + (1 - decay) w_given``; gives the norm of the change of all weights, the same on every rank."""
    pairs = fitting(mine, given, titles)
    low = next((s.tensor.dtype for s, _ in pairs if s.tensor.dtype not in _WIDE), None)
    if low is not None and 0 < decay < 1:
        raise ModelError(
            f"The weights of '{titles[0]}' are {low}, in which small steps of an average are lost.",
            fix='Declare the worker that follows with dtype="fp32".',
        )
    moved = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for shard, weight in pairs:
            step = (weight.to(shard.tensor) - shard.tensor) * (1 - decay)
            if decay == 0:
                shard.tensor.copy_(weight)
            else:
                shard.tensor.add_(step)
            if shard.main or mine.pool.data == 1:
                moved += step.double().square().sum().cpu()
    mine.written()
    return float(mine.pool.sum(moved).sqrt())


def fitting(mine: Parameters, given: Sequence[Shard], titles: tuple[str, str]) -> list[tuple[Shard, Tensor]]:
    """The weights of this rank, each with the same part of the given ones.

    Raises ModelError where one is missing, has another shape, or where its part is not there.
    """
    named, shards = {s.name: s for s in given}, mine.shards()
    lacking = sorted({s.name for s in shards} - set(named))
    if lacking or any(s.shape != named[s.name].shape for s in shards):
        raise ModelError(
            f"The weights of '{titles[1]}' do not fit '{titles[0]}'.",
            have=lacking[:5] or None,
            fix="Use the same model for both.",
        )
    apart = next((s.name for s in shards if not _inside(s, named[s.name])), None)
    if apart is not None:
        raise ModelError(
            f"'{titles[1]}' has other parts of its weights on this rank than '{titles[0]}' needs, of '{apart}' first.",
            fix="Give both the same mesh.",
        )
    return [(s, named[s.name].view(s.box) if s.tensor.numel() else s.tensor) for s in shards]


def _inside(part: Shard, whole: Shard) -> bool:
    """Whether the box of one is inside of that of the other."""
    pairs = zip(part.box, whole.box, strict=True)
    return not part.tensor.numel() or all(a <= low and high <= b for (low, high), (a, b) in pairs)
