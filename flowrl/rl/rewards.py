"""Rewards made of lengths, log-probabilities or other rewards, as ops of a program; see ``math/rewards.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..graph.ops.allowed import number
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import ANCHORS, KL_KINDS, one_of, refusal, refuse_lone_rows, warn_of_lone_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column


def _kl_reads(call: CallShape) -> str:
    one_of("rl.kl_penalty", "kind", call.call.get("kind"), KL_KINDS)
    anchor = one_of("rl.kl_penalty", "anchor", call.call.get("anchor"), ANCHORS)
    return f"{anchor}_logprobs, ref_logprobs, response_mask"


@op(owner="rl", reads=_kl_reads, adds="token_rewards: f32[*response]", cost="local", pieces=True)
@takes(coef=number(least=0, fix="Give coef= the weight of the penalty, such as 0.001."))
def kl_penalty(batch: Batch, *, coef: float, kind: str = "k1", anchor: str = "rollout") -> dict[str, Column]:
    """``token_rewards = -coef * KL(policy, reference)`` of each sampled token, 0 elsewhere (arXiv:1909.08593, eq. 2).

    ``rl.gae`` adds these to the row's reward. The KL at a token is estimated by ``k1``: ``log p - log ref``; ``k2``:
    half its square; or ``k3`` (see :mod:`flowrl.rl.math.kl`).

    Args:
        batch: reads ``ref_logprobs``, ``response_mask``, and ``rollout_logprobs`` or ``old_logprobs``.
        coef: the weight of the penalty; may be a value of the program, such as a controlled coefficient.
        kind: the estimator.
        anchor: whose log-probabilities are the policy's: ``rollout``, ``sampling`` or ``old``.

    >>> batch = fl.Batch.of(
    ...     1,
    ...     response_mask=fl.Column.of([[True, True]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-1.0, -2.0]], "response"),
    ...     ref_logprobs=fl.Column.of([[-2.0, -2.0]], "response"),
    ... )
    >>> rl.kl_penalty(batch, coef=0.5).token_rewards.to_list()
    [[-0.5, 0.0]]
    """
    from .math.kl import estimate

    ref, mask = batch.ref_logprobs, batch.response_mask.values
    policy = batch[f"{anchor}_logprobs"].values
    return {"token_rewards": ref.with_values(-float(coef) * estimate(policy, ref.values, kind) * mask)}


def _overlong_reads(call: CallShape) -> str:
    longest, buffer = call.call.get("longest"), call.call.get("buffer")
    if isinstance(longest, int) and isinstance(buffer, int) and not 0 < buffer <= longest:
        raise refusal(
            f"rl.overlong_penalty: buffer={buffer} is no part of the longest={longest} tokens.",
            f"Give buffer= a number from 1 to {max(longest, 1)}.",
        )
    return "response_mask"


@op(owner="rl", reads=_overlong_reads, adds="overlong_penalty: f32[]", cost="local", pieces=True)
def overlong_penalty(batch: Batch, *, longest: int, buffer: int) -> dict[str, Column]:
    """``min(0, max(-1, (longest - buffer - n) / buffer))`` of ``n`` sampled tokens (DAPO, arXiv:2503.14476, eq. 13).

    It is 0 up to ``longest - buffer`` tokens, falls to -1 at ``longest``, and stays there. Add it to a reward.

    Args:
        batch: reads ``response_mask``.
        longest: the number of tokens where the penalty is whole.
        buffer: over how many tokens before it grows.

    >>> batch = fl.Batch.of(2, response_mask=fl.Column.of([[True] * 5, [True] * 7], "response"))
    >>> rl.overlong_penalty(batch, longest=8, buffer=2).overlong_penalty.to_list()
    [0.0, -0.5]
    """
    from .math.rewards import overlong, sampled

    mask = batch.response_mask
    return {"overlong_penalty": _by_row(overlong(sampled(mask.values, mask.lengths), int(longest), int(buffer)))}


_ALL_0 = "every penalty would be 0"


def _length_reads(call: CallShape) -> str:
    refuse_lone_rows("rl.length_penalty", call, _ALL_0)
    return "rewards, response_mask"


@op(owner="rl", reads=_length_reads, adds="length_penalty: f32[]", cost="local", pieces=True)
def length_penalty(batch: Batch, *, correct: float = 0.5) -> dict[str, Column]:
    """``1/2 - (n - n_min) / (n_max - n_min)``, at most 0 for wrong answers (Kimi k1.5, arXiv:2501.12599).

    ``n`` is the number of sampled tokens, ``n_min`` and ``n_max`` the smallest and largest of the prompt's rows, wrong
    ones too. Where they are equal, as for a prompt with one row, it is 0. The shortest correct answer has 1/2, the
    longest -1/2. Weigh it and add it to a reward.

    Args:
        batch: reads ``rewards`` f32[] and ``response_mask``.
        correct: the reward from which on an answer counts as correct.

    >>> mask = fl.Column.of([[True], [True, True, True]], "response")
    >>> batch = fl.Batch.of([(0, 0), (0, 1)], rewards=[1.0, 1.0], response_mask=mask)
    >>> rl.length_penalty(batch).length_penalty.to_list()
    [0.5, -0.5]
    """
    from .math.rewards import by_length, sampled

    warn_of_lone_rows("rl.length_penalty", batch, _ALL_0)
    mask, rewards = batch.response_mask, batch.rewards.values
    group, count = batch.group_index()
    length = sampled(mask.values, mask.lengths)
    return {"length_penalty": _by_row(by_length(length, rewards >= float(correct), group.to(length.device), count))}


def _of(call: CallShape) -> str:
    """The field that ``of=`` names; where no call has said one yet, it is called ``of``."""
    of = call.call.get("of")
    return f"{of if isinstance(of, str) else 'of'}: f32[]"


def _clipped_reads(call: CallShape) -> str:
    low, high = call.call.get("low"), call.call.get("high")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise refusal(f"rl.clipped_rewards: low={low} lies above high={high}.", f"Write low={high}, high={low}.")
    return _of(call)


@op(owner="rl", reads=_clipped_reads, adds="rewards: f32[]", cost="local", pieces=True)
def clipped_rewards(batch: Batch, *, of: str, low: float, high: float) -> dict[str, Column]:
    """``min(high, max(low, r))`` of each row.

    Args:
        batch: reads the field that ``of`` names, f32[], such as what ``score`` added under another name with ``into=``.
        low: the smallest reward.
        high: the largest.

    >>> batch = fl.Batch.of(3, scores=[-9.0, 0.5, 9.0])
    >>> rl.clipped_rewards(batch, of="scores", low=-1.0, high=1.0).rewards.to_list()
    [-1.0, 0.5, 1.0]
    """
    return {"rewards": _by_row(batch[of].values.clamp(float(low), float(high)))}


@op(owner="rl", reads=_of, adds="rewards: f32[]", cost="local")
def whitened_rewards(batch: Batch, *, of: str, shift: bool = True) -> dict[str, Column]:
    """``(r - mean(r)) / std(r)`` over the rows of the call, without Bessel's correction (arXiv:1909.08593).

    Equal rewards give 0, or their mean with ``shift=False``.

    Args:
        batch: reads the field that ``of`` names, f32[].
        shift: whether the mean becomes 0; otherwise it stays what it was.

    >>> batch = fl.Batch.of(2, scores=[3.0, 1.0])
    >>> rl.whitened_rewards(batch, of="scores").rewards.to_list()
    [1.0, -1.0]
    """
    from .math.rewards import whitened

    return {"rewards": _by_row(whitened(batch[of].values, shift=shift))}


def _by_row(values: Tensor) -> Column:
    from ..batch import Column

    return Column(values.float())
