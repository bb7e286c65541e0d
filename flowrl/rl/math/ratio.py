"""Where a policy is from its anchor: log-probabilities of the anchor, and log-ratios per token or per row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..loss_spec import LossInputs
from .kl import guarded


@dataclass(frozen=True)
class Moved:
    """Where the policy is from its anchor: the anchor's log-probabilities and the log-ratios, [total] each."""

    before: Tensor
    log: Tensor

    @cached_property
    def ratio(self) -> Tensor:
        return self.log.exp()


def anchored(x: LossInputs, anchor: str) -> Tensor:
    """Log-probabilities of the anchor's policy [total], without gradient."""
    if anchor != "loglinear":
        return x[f"{anchor}_logprobs"]
    sampled = x["rollout_logprobs"]
    age = (x.version - x["versions"]).clamp(min=0).to(sampled.dtype)
    return sampled + age / (age + 1) * (x.predicted.detach() - sampled)


def moved_from(x: LossInputs, anchor: str, level: str) -> Moved:
    """Where the policy is from an anchor, in ratios of a level."""
    before = anchored(x, anchor)
    return Moved(before, at_level(x, guarded(x.predicted - before), level))


def at_level(x: LossInputs, moved: Tensor, level: str) -> Tensor:
    """Log-ratios [total] of tokens, or of their rows, spread over the row's tokens."""
    if level == "token":
        return moved
    if level == "sequence":
        return x.spread(guarded(x.row_sum(moved)))
    mean = x.spread(x.row_mean(moved))
    return mean if level == "geometric" else mean.detach() + moved - moved.detach()
