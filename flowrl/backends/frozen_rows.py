"""Rows of a run as they were sampled, and one way to compute their log-probabilities that may explain a gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..workers.model_options import Sampling


@dataclass(frozen=True)
class FrozenRows:
    """Rows as an engine sampled them: tokens, and how likely it said that they are.

    ``temperature`` f64[rows]. Packed along the tokens after the prompts, [total]: ``logprobs`` f64, the engine's;
    ``compared`` bool, the tokens that it sampled with the version of the weights that is looked at. ``texts`` are the
    prompts as text, where the run kept them. ``samplings``: how the program samples.
    """

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    temperature: Tensor
    logprobs: Tensor
    compared: Tensor
    texts: Sequence[str | None] = ()
    samplings: Sequence[Sampling] = ()

    def gap(self, logprobs: Tensor) -> float:
        """Return the mean absolute difference of ``logprobs`` [total] to the engine's, over the compared tokens."""
        return float((logprobs - self.logprobs).abs()[self.compared].mean())


@dataclass(frozen=True)
class Change:
    """One thing that an engine may do otherwise: ``Change("temperature", "0.7 in place of 1", compute)``.

    ``compute`` gives the log-probabilities [total] of a trainer with this change and no other.
    """

    cause: str
    what: str
    compute: Callable[[], Tensor]


@dataclass(frozen=True)
class OldWeights:
    """Weights of an earlier time, by name: ``OldWeights("the weights of the start", {...})``."""

    what: str
    weights: dict[str, Any]
