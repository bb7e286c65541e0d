"""Which sampled tokens an update is held against, and what the gap between engine and trainer is called in metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..graph.ops.signature import CallShape
from ..marks import values

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column

#: A field that an update hands to its engine, f32[*response]: the log-probability that the engine should find for each
#: token with the weights as they are; NaN where it is not known.
EXPECTED = "expected_logprobs"
LARGEST, TOKENS = "gap_max", "gap_tokens"
#: Over the tokens that are compared: mean and largest of |difference|, KL from the sampling policy to the trainer's
#: (k3), the share of tokens whose difference is beyond ``gap_bound``, and how many tokens were compared.
MEASURES = ("gap_mean", LARGEST, "gap_k3", "gap_beyond", TOKENS)
_NEEDS = ("versions", "temperature")


def compared_fields(shape: CallShape) -> tuple[str, ...]:
    """Return the fields that an update reads to measure the gap; none where its rows cannot have one.

    Log-probabilities at another temperature than that of the rows are of another kind. Losses that do not ask who
    sampled, such as cross entropy, need nothing of the engine. An update among the tokens that could be drawn is
    compared with what was sampled from.
    """
    said = shape.call
    other = said.get("temperature") is not None or said.get("foreign") not in (None, False)
    other = other or getattr(said.get("loss"), "foreign", False)
    sampled = _sampled(support=said.get("support") is True)
    return () if other or not shape.have.issuperset((sampled, *_NEEDS)) else (sampled, "versions")


def _sampled(*, support: bool) -> str:
    return "sampling_logprobs" if support else "rollout_logprobs"


def with_expected(batch: Batch, *, worker: str, version: int, temperature: float | None) -> Batch:
    """Return the rows with :data:`EXPECTED`, where ``worker`` sampled them at the temperature that they are read at.

    Tokens are compared that were sampled with ``version`` of the weights, which the update starts from: where rows kept
    their keys and values through a publish, those of rows that began with it, and of turns of an episode that did.
    """
    import torch

    sampled = _sampled(support="support_ids" in batch)
    if temperature is not None or not all(name in batch for name in (sampled, *_NEEDS)):
        return batch
    if values(batch["tokens"].marks, "sampler") != {worker}:
        return batch
    logprobs, mask = batch[sampled], batch["response_mask"].values
    same = mask & (batch["versions"].values == version)
    if values(batch["versions"].marks, "cache"):
        same &= _begun_with(batch["versions"], mask, version)
    return batch.with_columns({EXPECTED: logprobs.with_values(torch.where(same, logprobs.values, torch.nan))})


def _begun_with(versions: Column, mask: Tensor, version: int) -> Tensor:
    """Return, for each sampled token, whether the first one of its row was sampled with a version; of an episode, the
    first one behind what was observed last, as there keys and values are computed anew."""
    import torch

    lengths = versions.lengths
    assert lengths is not None, "every token has a version"
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).to(mask.device)
    place = torch.arange(len(mask), device=mask.device)
    begins = mask & ((place == first) | ~mask.roll(1))
    begun = torch.where(begins, place, first).cummax(0).values
    return versions.values[begun] == version
