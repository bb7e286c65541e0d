"""Which prompts and tokens an update is about, as ops of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ProgramError
from ..graph.op import CallShape, op
from .said import ANCHORS, one_of

if TYPE_CHECKING:
    from ..batch import Batch, Column


def _reads(call: CallShape) -> str:
    anchor = one_of("rl.select_by_covariance", "anchor", call.call.get("anchor"), ANCHORS)
    one_of("rl.select_by_covariance", "how", call.call.get("how"), ("largest", "drawn"))
    return f"advantages, {anchor}_logprobs, response_mask"


@op(owner="rl", reads=_reads, adds="selected: bool[*response]", cost="local")
def select_by_covariance(
    batch: Batch,
    *,
    how: str = "largest",
    share: float = 2e-4,
    low: float = float("-inf"),
    high: float = float("inf"),
    anchor: str = "rollout",
) -> dict[str, Column]:
    """Adds ``selected``: tokens by ``(A - mean A) (log p - mean log p)``, the means over all sampled tokens.

    The covariance that lets the entropy fall (arXiv:2505.22617, section 4.2). Departure: log p is that of the policy
    that sampled, where the published code takes the current one; both are the same at the first optimizer step.

    Args:
        batch: reads ``advantages``, ``response_mask``, and ``rollout_logprobs`` or ``old_logprobs``.
        how: ``largest``, those with the largest covariances (KL-Cov); or ``drawn``, some of those inside the bounds,
            drawn by the seeds of their rows (Clip-Cov).
            Of equal covariances the first in the batch is taken.
        share: of all sampled tokens, how many are selected; at least one is, where the bounds leave one.
        low, high: bounds of the covariance.
        anchor: whose log-probabilities: ``rollout`` or ``old``.
    """
    from .math.policy import drawn_numbers, selected_by_covariance

    mask, advantages = batch.response_mask, batch.advantages
    drawn = None
    if how == "drawn":
        drawn = drawn_numbers(batch.row_seeds("covariance"), mask.lengths).to(mask.values.device)
    found = selected_by_covariance(
        advantages.values,
        batch[f"{anchor}_logprobs"].values,
        mask.values,
        share=float(share),
        low=float(low),
        high=float(high),
        drawn=drawn,
    )
    return {"selected": mask.with_values(found)}


@op(owner="rl", reads="", rows="filter", cost="local")
def first_groups(batch: Batch, n: int) -> Batch:
    """The rows of the first ``n`` prompts, in the order in which they were drawn; all of them where there are fewer."""
    if n < 0:
        raise ProgramError(f"rl.first_groups: n={n}.", fix="Give 0 or more.")
    kept = set(sorted({key[0] for key in batch.keys})[:n])
    return batch.take([i for i, key in enumerate(batch.keys) if key[0] in kept])
