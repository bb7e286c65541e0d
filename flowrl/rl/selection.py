"""Which prompts and tokens an update is about, as ops of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..graph.ops.allowed import number, whole
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import ANCHORS, one_of

if TYPE_CHECKING:
    from ..batch import Batch, Column


def _reads(call: CallShape) -> str:
    anchor = one_of("rl.select_by_covariance", "anchor", call.call.get("anchor"), ANCHORS)
    one_of("rl.select_by_covariance", "how", call.call.get("how"), ("largest", "drawn"))
    return f"advantages, {anchor}_logprobs, response_mask"


@op(owner="rl", reads=_reads, adds="selected: bool[*response]", cost="local")
@takes(share=number(least=0, most=1), low=number(finite=False), high=number(finite=False))
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
        anchor: whose log-probabilities: ``rollout``, ``sampling`` or ``old``.

    >>> batch = fl.Batch.of(
    ...     2,
    ...     advantages=fl.Column.of([[1.0, 1.0], [-1.0]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-0.1, -3.0], [-3.0]], "response"),
    ...     response_mask=fl.Column.of([[True, True], [True]], "response"),
    ... )
    >>> rl.select_by_covariance(batch, share=0.3).selected.to_list()
    [[True, False], [False]]
    """
    from .math.token_selection import drawn_numbers, selected_by_covariance

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


@op(owner="rl", reads="entropies, response_mask", adds="selected: bool[*response]", cost="local")
@takes(share=number(above=0, most=1, fix="Give a number above 0 and at most 1, such as 0.2."))
def select_by_entropy(batch: Batch, *, share: float = 0.2) -> dict[str, Column]:
    """Adds ``selected``: the ``share`` of all sampled tokens before which the policy was least sure.

    Those whose entropy is at least the ``1 - share`` quantile, interpolated linearly, of all sampled tokens of the
    batch; so equal ones may be more (arXiv:2506.01939, eq. 6). A loss with ``only="selected"`` trains them alone.
    Departure: the entropy is that of the policy before the update, where the paper takes the current one; both are the
    same at the first optimizer step.

    Args:
        batch: reads ``response_mask`` and ``entropies``, which ``actor.entropies(batch)`` adds.
        share: of all sampled tokens, how many are selected.

    >>> batch = fl.Batch.of(
    ...     1,
    ...     entropies=fl.Column.of([[0.1, 2.0, 0.3]], "response"),
    ...     response_mask=fl.Column.of([[True, True, True]], "response"),
    ... )
    >>> rl.select_by_entropy(batch, share=0.3).selected.to_list()
    [[False, True, False]]
    """
    from .math.token_selection import selected_by_entropy

    mask = batch.response_mask
    return {"selected": mask.with_values(selected_by_entropy(batch.entropies.values, mask.values, float(share)))}


def _moment_reads(call: CallShape) -> str:
    among = one_of("rl.select_by_second_moment", "among", call.call.get("among"), ("all", "away"))
    return "old_logprobs, rollout_logprobs, response_mask" + (", advantages" if among == "away" else "")


@op(owner="rl", reads=_moment_reads, adds="selected: bool[*response]", cost="local")
def select_by_second_moment(batch: Batch, *, limit: float = 0.04, among: str = "all") -> dict[str, Column]:
    """Adds ``selected``: all sampled tokens but those that moved furthest, so that ``mean (log w)^2 < limit``.

    ``w = p_old / p_rollout``; tokens with the largest ``(log w)^2`` go first, and of equal ones all go together (M2PO,
    arXiv:2510.01161). :func:`flowrl.rl.m2po` trains those that stay. The smallest stay in any case. Departure: ``w`` is
    that of the policy before the update, as in AReaL, where the paper takes the current one; both are the same at the
    first optimizer step.

    Args:
        batch: reads ``old_logprobs``, ``rollout_logprobs``, ``response_mask``, and ``advantages`` for ``away``.
        limit: of the mean over the tokens that stay.
        among: which tokens are counted and may go: ``all``; or ``away``, those that moved in the direction of A
            already (A > 0 and w > 1, or A < 0 and w < 1), as in the authors' code.

    >>> batch = fl.Batch.of(
    ...     1,
    ...     old_logprobs=fl.Column.of([[-1.0, -1.0]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-1.0, -3.0]], "response"),
    ...     response_mask=fl.Column.of([[True, True]], "response"),
    ... )
    >>> rl.select_by_second_moment(batch).selected.to_list()
    [[True, False]]
    """
    from .math.kl import guarded
    from .math.token_selection import selected_by_second_moment

    mask = batch.response_mask
    moved = guarded(batch.old_logprobs.values - batch.rollout_logprobs.values)
    counted = mask.values if among == "all" else moved * batch.advantages.values > 0
    return {"selected": mask.with_values(selected_by_second_moment(moved, counted, mask.values, float(limit)))}


@op(owner="rl", reads="", rows="filter", cost="local")
@takes(n=whole(least=0))
def first_groups(batch: Batch, n: int) -> Batch:
    """The rows of the first ``n`` prompts, in the order in which they were drawn; all of them where there are fewer.

    >>> batch = fl.Batch.of([(4, 0), (4, 1), (9, 0)], rewards=[0.0, 1.0, 1.0])
    >>> rl.first_groups(batch, 1).keys
    ((4, 0), (4, 1))
    """
    kept = set(sorted({key[0] for key in batch.keys})[:n])
    return batch.take([i for i, key in enumerate(batch.keys) if key[0] in kept])
