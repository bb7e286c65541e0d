"""Weights of earlier times that an engine may still have: of the start, of a checkpoint, of one step before."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from ...frozen_rows import OldWeights
from ..engine import HFEngine
from ..train import learning_rate


class Saved(Protocol):
    """A checkpoint of a worker, its tensors by name."""

    def names(self) -> list[str]: ...
    def whole(self, name: str) -> Tensor: ...


def at_start(engine: HFEngine) -> OldWeights:
    """The trained weights of an engine that was just opened."""
    return OldWeights("the weights of the start", {n: w.detach().clone() for n, w in engine.parameters.trained.items()})


def of_checkpoint(engine: HFEngine, files: Saved, what: str) -> OldWeights:
    """The trained weights of another checkpoint."""
    there = set(files.names())
    found = {n: files.whole(f"weights.{n}") for n in engine.parameters.trained if f"weights.{n}" in there}
    return OldWeights(what, found)


def one_step_back(engine: HFEngine, files: Saved, meta: Any, lr: float | None) -> OldWeights | None:
    """The weights before the last optimizer step, which AdamW's moments say; None where there are none.

    ``lr``: of that step, where the run has recorded it; else the schedule's. Loshchilov & Hutter 2019, algorithm 2.
    """
    optim, steps, there = engine.build.optim, int(meta.get("steps", 0)), set(files.names())
    if optim is None or not steps:
        return None
    rate = learning_rate(optim, steps - 1) if lr is None else lr
    found: dict[str, Tensor] = {}
    for name, weight in engine.parameters.trained.items():
        if f"exp_avg.{name}" not in there or f"weights.{name}" not in there:
            continue
        mean, square = files.whole(f"exp_avg.{name}").double(), files.whole(f"exp_avg_sq.{name}").double()
        first, second = (1 - beta**steps for beta in optim.betas)
        moved = (rate / first) * mean / (square.sqrt() / math.sqrt(second) + optim.eps)
        decay = 1 - rate * optim.weight_decay if weight.dim() > 1 else 1.0
        found[name] = ((files.whole(f"weights.{name}").double() + moved) / decay).to(torch.float32)
    return OldWeights("the weights of one optimizer step before", found) if found else None
