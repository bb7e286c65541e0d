"""What each op and loss of the library is called with, reads and adds; the mathematics lies beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ProgramError, near
from ..graph import session as sessions
from ..graph.op import CallShape, op
from .spec import Loss

if TYPE_CHECKING:
    from ..batch import Batch, Column

KL_KINDS = ("k1", "k2", "k3")
ANCHORS = ("rollout", "old")


# -- ops: they add a field ------------------------------------------------------------------------------------------


def _group_reads(call: CallShape) -> str:
    _one_of("rl.group_advantages", "scale", call.call.get("scale"), ("std", "none"))
    return "rewards, response_mask"


@op(owner="rl", reads=_group_reads, adds="advantages: f32[*response]", cost="local", pieces=True)
def group_advantages(
    batch: Batch, *, scale: str = "std", eps: float = 1e-4, leave_one_out: bool = False
) -> dict[str, Column]:
    """``(r - mean(r)) / (std(r) + eps)`` over the rows of one prompt (GRPO, arXiv:2402.03300, section 4.1.2).

    Every token of a row that the policy sampled has the row's advantage; the others have 0. Rows of a prompt are
    those with the same uid, the first number of their key. The std has Bessel's correction, and a prompt with one row
    has advantage 0.

    Args:
        batch: reads ``rewards`` f32[] and ``response_mask`` bool[*response], in any order of rows.
        scale: ``std``, or ``none`` for the difference to the mean alone (Dr. GRPO, arXiv:2503.20783).
        eps: added to the std, so that equal rewards divide by no zero.
        leave_one_out: the mean is that of the prompt's *other* rows (RLOO, arXiv:2402.14740).
    """
    from .advantages import group_normalised

    group, count = batch.group_index()
    by_row = group_normalised(
        batch.rewards.values, group, count, scale=scale, eps=float(eps), leave_one_out=leave_one_out
    )
    mask = batch.response_mask
    spread = by_row.repeat_interleave(mask.lengths.to(by_row.device), output_size=mask.values.numel())
    return {"advantages": mask.with_values(spread * mask.values)}


def _gae_reads(call: CallShape) -> str:
    given = ", token_rewards: f32[*response]" if "token_rewards" in call.have else ""
    return "rewards, values, response_mask" + given


@op(
    owner="rl",
    reads=_gae_reads,
    adds="advantages: f32[*response], returns: f32[*response]",
    cost="local",
    pieces=lambda call: not call.call.get("whiten"),
)
def gae(batch: Batch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = False) -> dict[str, Column]:
    """``A_t = d_t + gamma lam A_{t+1}``, ``d_t = r_t + gamma V_{t+1} - V_t`` (arXiv:1506.02438, eq. 11-16).

    Time counts the tokens that the policy sampled: a token outside ``response_mask`` (an observation) is no step, the
    chain goes across it, and it has advantage 0 and its own value as return. A row's reward is paid at its last
    sampled token, added to ``token_rewards`` where the batch has them; the value after that token is 0.

    Args:
        batch: reads ``rewards`` f32[], ``values`` f32[*response] (before each token), ``response_mask``, and
            ``token_rewards`` f32[*response] where it is there.
        gamma: discount per sampled token.
        lam: how far the estimate looks: 0 is one step, 1 is the whole return.
        whiten: shift and scale the advantages of the call to mean 0 and std 1 over all sampled tokens, not the returns.
    """
    from .advantages import generalised, whitened

    mask, values = batch.response_mask, batch.values
    token_rewards = batch.token_rewards.values if "token_rewards" in batch.fields else None
    advantages, returns = generalised(
        batch.rewards.values,
        values.values,
        mask.values,
        mask.lengths,
        token_rewards=token_rewards,
        gamma=float(gamma),
        lam=float(lam),
    )
    if whiten:
        advantages = whitened(advantages, mask.values)
    return {"advantages": values.with_values(advantages), "returns": values.with_values(returns)}


def _kl_reads(call: CallShape) -> str:
    _one_of("rl.kl_penalty", "kind", call.call.get("kind"), KL_KINDS)
    anchor = _one_of("rl.kl_penalty", "anchor", call.call.get("anchor"), ANCHORS)
    return f"{anchor}_logprobs, ref_logprobs, response_mask"


@op(owner="rl", reads=_kl_reads, adds="token_rewards: f32[*response]", cost="local", pieces=True)
def kl_penalty(batch: Batch, *, coef: float, kind: str = "k1", anchor: str = "rollout") -> dict[str, Column]:
    """``token_rewards = -coef * KL(policy, reference)`` of each sampled token, 0 elsewhere (arXiv:1909.08593, eq. 2).

    ``rl.gae`` adds these to the row's reward. The KL at a token is estimated by ``k1``: ``log p - log ref``; ``k2``:
    half its square; or ``k3`` (see :mod:`flowrl.rl.kl`).

    Args:
        batch: reads ``ref_logprobs``, ``response_mask``, and ``rollout_logprobs`` or ``old_logprobs``.
        coef: the weight of the penalty; may be a value of the program, such as a controlled coefficient.
        kind: the estimator.
        anchor: whose log-probabilities are the policy's: ``rollout`` or ``old``.
    """
    from .kl import estimate

    ref, mask = batch.ref_logprobs, batch.response_mask.values
    policy = batch[f"{anchor}_logprobs"].values
    return {"token_rewards": ref.with_values(-float(coef) * estimate(policy, ref.values, kind) * mask)}


# -- losses: they are given to an update ----------------------------------------------------------------------------


def ppo_clip(
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_kind: str = "k3",
    entropy: float = 0.0,
    anchor: str = "rollout",
    aggregate: str = "token-mean",
) -> Loss:
    """``-min(w A, clamp(w, 1-clip, 1+clip_high) A) + kl KL - entropy H`` per token (PPO, arXiv:1707.06347, eq. 7).

    ``w`` is the ratio of the policy to the one named by ``anchor``: ``rollout``, the engine that sampled, so rows may
    be older than the weights; or ``old``, the trainer before the update (``old_logprobs``).

    Args:
        clip: how far the ratio may fall below 1, and rise above it where ``clip_high`` is None.
        clip_high: how far it may rise above 1 (DAPO, arXiv:2503.14476).
        kl: weight of the KL to the reference, estimated by ``kl_kind``; with 0 ``ref_logprobs`` are not read.
        entropy: weight of the entropy bonus.
        aggregate: how tokens become one number: ``token-mean``, ``token-sum``, ``seq-mean-token-mean`` or
            ``seq-mean-token-sum``.

    Reports ``ratio``, ``clip_fraction``, ``approx_kl`` (k3 from the anchor to now); ``kl``, ``entropy`` where asked.
    """
    _one_of("rl.ppo_clip", "anchor", anchor, ANCHORS)
    _one_of("rl.ppo_clip", "kl_kind", kl_kind, KL_KINDS)
    reads = [f"{anchor}_logprobs", "advantages", "response_mask"]
    if not _is_zero(kl):
        reads.append("ref_logprobs")
    return Loss(
        name="ppo_clip",
        reads=", ".join(reads),
        parameters={
            "clip": clip,
            "clip_high": clip_high,
            "kl": kl,
            "kl_kind": kl_kind,
            "entropy": entropy,
            "anchor": anchor,
        },
        math="flowrl.rl.losses:ppo_clip",
        aggregate=aggregate,
        needs_entropy=not _is_zero(entropy),
        corrects_stale=anchor == "rollout",
        zero_advantage_is_zero=_is_zero(kl) and _is_zero(entropy),
    )


def value_clip(*, clip: float | None = 0.2, aggregate: str = "token-mean") -> Loss:
    """``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`` per token, of a critic.

    ``R`` are ``returns``, ``V_old`` the ``values`` that the returns were made with (the clipping is that of PPO's
    reference code); ``clip=None`` is the plain square. It is a regression on what the rows themselves returned, with
    no ratio in it, so rows may be older than the weights. Reports ``value_error`` and ``value_clip_fraction``.
    """
    return Loss(
        name="value_clip",
        reads="values, returns, response_mask",
        parameters={"clip": clip},
        math="flowrl.rl.losses:value_clip",
        aggregate=aggregate,
        on="values",
        corrects_stale=True,
    )


def sft(*, aggregate: str = "token-mean") -> Loss:
    """``-log p`` of every token of ``response_mask``: supervised training.

    It asks not who wrote the tokens, so rows may be of any age.
    """
    return Loss(
        name="sft",
        reads="response_mask",
        math="flowrl.rl.losses:sft",
        aggregate=aggregate,
        corrects_stale=True,
    )


def _is_zero(number: Any) -> bool:
    """Whether a weight is 0 for good: one that the program computes is not."""
    return isinstance(number, (int, float)) and number == 0


def _one_of(title: str, name: str, said: Any, words: Sequence[str]) -> str:
    if said not in words:
        meant = near(str(said), words) or words[0]
        raise ProgramError(
            f"{title}: {name}={said!r} is none of {', '.join(words)}.",
            at=sessions.caller(),
            fix=f'Write {name}="{meant}".',
        )
    return said
