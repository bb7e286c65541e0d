"""Advantages that share out several rewards, or those of sets, tokens and turns; mathematics in ``math/credit.py``."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from typing import TYPE_CHECKING

from ..graph.ops.allowed import number, whole
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .advantages import ADDS, ALL_0, SHARE, groups_of, paid_by_token, token_rewards_of
from .validate import ANCHORS, one_of, refusal, refuse_lone_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column


def _gdpo_reads(call: CallShape) -> str:
    names, weights = call.call.get("rewards"), call.call.get("weights")
    if names is Parameter.empty:  # asked what it would read before there is a call
        names = ("correctness", "format")
    if isinstance(names, str) or not names:
        raise refusal(
            f"rl.gdpo: rewards={names!r} does not name the fields of several rewards.",
            f'Write rewards=("{names or "correctness"}", "format").',
        )
    if weights is not None and len(weights) != len(names):
        raise refusal(
            f"rl.gdpo: {len(weights)} weights for {len(names)} rewards.",
            f"Give one weight for each of {', '.join(names)}.",
        )
    refuse_lone_rows("rl.gdpo", call, ALL_0)
    return ", ".join([*(f"{name}: f32[]" for name in names), "response_mask"])


@op(owner="rl", reads=_gdpo_reads, adds=ADDS, cost="local")
@takes(eps=number(least=0))
def gdpo(
    batch: Batch, *, rewards: Sequence[str], weights: Sequence[float] | None = None, eps: float = 1e-4
) -> dict[str, Column]:
    """``N_batch(sum_k w_k N_group(r_k))``, ``N(x) = (x - mean) / (std + eps)`` (GDPO, arXiv:2601.05242).

    Several rewards are told apart where their sum would be the same. A reward that is equal over a prompt says nothing
    there. Both stds are over rows, with Bessel's correction; rows without a sampled token count in them.

    Args:
        batch: reads ``response_mask`` and the fields named by ``rewards``, f32[] each.
        rewards: names of the fields.
        weights: of the rewards, 1 each where None.
        eps: added to both stds.

    >>> mask = fl.Column.of([[True, True], [True]], "response")
    >>> batch = fl.Batch.of([(0, 0), (0, 1)], right=[1.0, 0.0], short=[1.0, 1.0], response_mask=mask)
    >>> batch = rl.gdpo(batch, rewards=["right", "short"])
    >>> [round(a, 2) for a in batch.advantages.row_mean().to_list()]
    [0.71, -0.71]
    """
    from .math.advantages import row_of
    from .math.credit import decoupled

    mask = batch.response_mask
    shares = [float(w) for w in weights] if weights is not None else [1.0] * len(rewards)
    by_row = decoupled([batch[name].values for name in rewards], shares, *groups_of(batch, "rl.gdpo"), eps=float(eps))
    row = row_of(mask.lengths, len(mask.values), mask.values.device)
    return {"advantages": mask.with_values(by_row[row].float() * mask.values)}


def _best_of_reads(call: CallShape) -> str:
    k = call.call.get("k")
    one_of("rl.pass_at_k", "scale", call.call.get("scale"), ("group", "none"))
    if isinstance(k, int) and call.rows_each is not None and call.rows_each <= k:
        raise refusal(
            f"rl.pass_at_k: k={k}, and each prompt has {call.rows_each} rows at most: {ALL_0}.",
            f"Write n={2 * k} in {call.sampled_by}, or a smaller k.",
        )
    return "rewards, response_mask"


@op(owner="rl", reads=_best_of_reads, adds=ADDS, cost="local", pieces=True)
@takes(k=whole(least=1, fix="Write k=4, and sample more rows than that of each prompt."), eps=number(least=0))
def pass_at_k(batch: Batch, *, k: int, scale: str = "group", eps: float = 1e-4) -> dict[str, Column]:
    """``A_i = (E[max r_S | i in S] - E[max r_S]) / (std(max r_S) + eps)``, S any ``k`` rows of the prompt.

    Pass@k training (arXiv:2508.10751) in its analytic form: a set of ``k`` answers is paid for its best one, each
    answer has the mean advantage of the sets that it is in, and no set is drawn. With rewards of 0 and 1, ``w`` of
    ``n`` rows wrong, ``p = 1 - C(w, k) / C(n, k)`` and ``s = sqrt(p (1 - p))``, right rows have ``(1 - p) / s`` and
    wrong ones ``(1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s``. Rewards may be any numbers here, which the paper
    leaves open. A prompt that has not more than ``k`` rows has 0, and so has one in which every set earns the same.

    Args:
        batch: reads ``rewards`` f32[] and ``response_mask`` ``bool[*response]``, in any order of rows.
        k: how many answers are one attempt; 1 is GRPO's advantage, with a std over rows without Bessel's correction.
        scale: ``group``, the std over all sets, without Bessel's correction; or ``none``, the difference alone.
        eps: added to the std.

    >>> mask = fl.Column.of([[True]] * 4, "response")
    >>> batch = fl.Batch.of([(0, i) for i in range(4)], rewards=[1.0, 1.0, 0.0, 0.0], response_mask=mask)
    >>> batch = rl.pass_at_k(batch, k=2, scale="none")
    >>> [round(a, 3) for a in batch.advantages.row_sum().to_list()]
    [0.167, 0.167, -0.167, -0.167]
    """
    from .math.advantages import row_of
    from .math.credit import best_of_sets

    mask, groups = batch.response_mask, groups_of(batch, "rl.pass_at_k", least=int(k) + 1)
    by_row = best_of_sets(batch.rewards.values, *groups, k=int(k), scale=scale, eps=float(eps))
    row = row_of(mask.lengths, len(mask.values), mask.values.device)
    return {"advantages": mask.with_values(by_row[row].float() * mask.values)}


def _token_baseline_reads(call: CallShape) -> str:
    anchor = one_of("rl.optimal_token_baseline", "anchor", call.call.get("anchor"), ANCHORS)
    refuse_lone_rows("rl.optimal_token_baseline", call, ALL_0)
    squares = call.call.get("sum_squares")
    return (
        f"rewards, response_mask, {anchor}_logprobs"
        + paid_by_token(call)
        + (f", {squares}: f32[*response]" if squares else "")
    )


@op(owner="rl", reads=_token_baseline_reads, adds=ADDS, cost="local", pieces=True)
def optimal_token_baseline(
    batch: Batch, *, anchor: str = "rollout", sum_squares: str | None = None
) -> dict[str, Column]:
    """``A_t = G_t - B_t``, ``B_t = sum_i G_it W_it / sum_i W_it`` over the prompt's rows (OTB, arXiv:2602.07078).

    ``t`` counts sampled tokens, and the sums are over the rows that have a ``t``-th one. ``G_t`` is what is paid from
    ``t`` on: the row's reward, and ``token_rewards`` where the batch has them. ``W_t = sum_{j<=t} w_j`` is how much the
    row has moved the policy so far: ``w = 1 - 2 p + S``, the squared norm of the gradient of ``log p`` by the logits,
    with ``p`` the probability of the token and ``S`` the sum of the squares of all. Without ``S``, its unbiased
    estimate from the token, ``p``, takes its place: ``w = 1 - p``. Where no row weighs anything ``B_t`` is their plain
    mean. A prompt with one row, and what one row has beyond all others, has advantage 0.

    Args:
        batch: reads ``rewards``, ``response_mask``, ``rollout_logprobs`` or ``old_logprobs``, and ``token_rewards``
            where it is there.
        anchor: whose log-probabilities: ``rollout``, ``sampling`` or ``old``.
        sum_squares: the name of a field ``f32[*response]`` with ``S``.

    >>> batch = fl.Batch.of(
    ...     [(0, 0), (0, 1)],
    ...     rewards=[1.0, 0.0],
    ...     response_mask=fl.Column.of([[True, True], [True]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-0.5, -0.5], [-0.5]], "response"),
    ... )
    >>> rl.optimal_token_baseline(batch).advantages.to_list()
    [[0.5, 0.0], [-0.5]]
    """
    from .math.credit import against_optimal_token

    mask = batch.response_mask
    found = against_optimal_token(
        batch.rewards.values,
        batch[f"{anchor}_logprobs"].values,
        mask.values,
        mask.lengths,
        *groups_of(batch, "rl.optimal_token_baseline"),
        token_rewards=token_rewards_of(batch),
        sum_squares=batch[sum_squares].values if sum_squares else None,
    )
    return {"advantages": mask.with_values(found.float())}


_TURNS = "turn_rewards: f32[*turn], turn_ids: i32[*response]"


def _gigpo_reads(call: CallShape) -> str:
    one_of("rl.gigpo", "scale", call.call.get("scale"), ("group", "none"))
    return f"rewards, response_mask, {_TURNS}, turn_states: i64[*turn]"


@op(owner="rl", reads=_gigpo_reads, adds=ADDS, cost="local", pieces=True)
@takes(weight=number(least=0), gamma=SHARE, eps=number(least=0))
def gigpo(
    batch: Batch, *, weight: float = 1.0, gamma: float = 0.95, scale: str = "group", eps: float = 1e-6
) -> dict[str, Column]:
    """``A = N_prompt(R) + weight N_anchor(G)``, ``N(x) = (x - mean) / (std + eps)`` (GiGPO, arXiv:2505.10978, eq. 3-8).

    A row is a whole episode with reward ``R``, and counts once in its prompt, however many turns it has.
    ``G_k = r_k + gamma G_{k+1}`` is the return of its turn ``k``; turns of a prompt that began in the same state are
    compared, also two of one episode. A sampled token has the sum for its row and turn, the others 0. A prompt with one
    row, and a state that was seen once, give 0. The stds have Bessel's correction.

    Args:
        batch: reads ``rewards`` f32[], ``response_mask``, ``turn_rewards`` ``f32[*turn]``, ``turn_states``
            ``i64[*turn]`` (the number of the state before the turn: equal within a prompt for equal states) and
            ``turn_ids`` ``i32[*response]`` (the turn of each token, from 0; -1 for observations).
        weight: of the turn's part.
        gamma: discount per turn.
        scale: ``group``, the stds, or ``none`` for the differences to the means alone.
        eps: added to the stds.

    Raises ProgramError for a sampled token of a turn that its row does not have.

    >>> batch = fl.Batch.of(
    ...     [(0, 0), (0, 1)],
    ...     rewards=[1.0, 0.0],
    ...     response_mask=fl.Column.of([[True], [True]], "response"),
    ...     turn_rewards=fl.Column.of([[1.0], [0.0]], "turn"),
    ...     turn_states=fl.Column.of([[7], [7]], "turn"),
    ...     turn_ids=fl.Column.of([[0], [0]], "response", "i32"),
    ... )
    >>> rl.gigpo(batch, scale="none").advantages.to_list()
    [[1.0], [-1.0]]
    """
    found = _by_turn(batch, batch.turn_states.values, weight=weight, gamma=gamma, scale=scale, eps=eps)
    return {"advantages": batch.response_mask.with_values(found.float())}


def _turns_read(call: CallShape) -> str:
    one_of("rl.turn_advantages", "scale", call.call.get("scale"), ("group", "none"))
    refuse_lone_rows("rl.turn_advantages", call, ALL_0)
    return f"rewards, response_mask, {_TURNS}"


@op(owner="rl", reads=_turns_read, adds=ADDS, cost="local", pieces=True)
@takes(weight=number(least=0), gamma=SHARE, eps=number(least=0))
def turn_advantages(
    batch: Batch, *, weight: float = 1.0, gamma: float = 1.0, scale: str = "group", eps: float = 1e-6
) -> dict[str, Column]:
    """``A = N_prompt(R) + weight N_k(G)``, ``N(x) = (x - mean) / (std + eps)`` (after MT-GRPO, arXiv:2505.11821).

    ``R`` is the reward of an episode, and ``G_k = r_k + gamma G_{k+1}`` the return of its turn ``k``, which is compared
    with those of the ``k``-th turns of the prompt's other episodes: where states hardly ever come again, and
    :func:`gigpo` finds nothing to compare. A reward that is given at the end belongs to the last turn; with
    ``gamma=0`` a turn is held against what it was paid itself. A sampled token has the sum for its row and turn, the
    others 0. A prompt with one row, and a turn that one episode alone came to, give 0. The stds have Bessel's
    correction.

    Args:
        batch: reads ``rewards`` f32[], ``response_mask``, ``turn_rewards`` ``f32[*turn]`` and ``turn_ids``
            ``i32[*response]`` (the turn of each token, from 0; -1 for observations).
        weight: of the turn's part.
        gamma: discount per turn.
        scale: ``group``, the stds, or ``none`` for the differences to the means alone.
        eps: added to the stds.

    Raises ProgramError for a sampled token of a turn that its row does not have.

    >>> batch = fl.Batch.of(
    ...     [(0, 0), (0, 1)],
    ...     rewards=[1.0, 0.0],
    ...     response_mask=fl.Column.of([[True, True], [True]], "response"),
    ...     turn_rewards=fl.Column.of([[1.0, 0.0], [0.0]], "turn"),
    ...     turn_ids=fl.Column.of([[0, 1], [0]], "response", "i32"),
    ... )
    >>> rl.turn_advantages(batch, scale="none").advantages.to_list()
    [[1.0, 0.5], [-1.0]]
    """
    from .math.credit import numbers_of_turns

    turns = numbers_of_turns(batch.turn_rewards.lengths)
    found = _by_turn(batch, turns, weight=weight, gamma=gamma, scale=scale, eps=eps, op="rl.turn_advantages")
    return {"advantages": batch.response_mask.with_values(found.float())}


def _by_turn(
    batch: Batch, anchors: Tensor, *, weight: float, gamma: float, scale: str, eps: float, op: str = "rl.gigpo"
) -> Tensor:
    """The advantage of episodes and that of turns with equal anchors, f64[response tokens]."""
    from .math.credit import in_groups_in_groups

    mask = batch.response_mask
    return in_groups_in_groups(
        batch.rewards.values,
        mask.values,
        mask.lengths,
        batch.turn_rewards.values,
        anchors,
        batch.turn_rewards.lengths,
        batch.turn_ids.values,
        *groups_of(batch),
        weight=float(weight),
        gamma=float(gamma),
        scale=scale,
        eps=float(eps),
        op=op,
    )
