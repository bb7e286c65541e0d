"""Published policy losses by name: each is :func:`flowrl.rl.policy_loss` with some of its parts chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

from ..errors import ProgramError, near
from ..graph.script.names_in_other_libraries import meant_argument
from ..graph.stand_ins import current_session as sessions
from . import gates
from .corrections import Part, correct
from .loss_spec import Loss
from .policy import Gate, policy_loss


@cache
def _parts() -> list[str]:
    """The parts of a loss that a preset may be given."""
    return [n for n in signature(policy_loss).parameters if n not in ("gate", "name")]


def _made(gate: Gate, name: str, own: Mapping[str, Any], parts: Mapping[str, Any]) -> Loss:
    """The loss of a preset: its own parts, and over them what the user says."""
    known = _parts()
    for word in parts:
        if word not in known:
            mine = [*known, *(signature(globals()[name]).parameters if name in globals() else ())]
            meant = meant_argument(word, mine) or near(word, mine)
            raise ProgramError(
                f"rl.{name} has no part '{word}'.",
                at=sessions.caller(),
                have=known,
                fix=f"Write {meant}=." if meant else "Leave it out.",
            )
    return policy_loss(gate, **{**own, **parts, "name": name})


def ppo_clip(
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual: float | None = None,
    kl: float = 0.0,
    kl_kind: str = "k3",
    entropy: float = 0.0,
    anchor: str = "rollout",
    aggregate: str = "token-mean",
    **parts: Any,
) -> Loss:
    """``-min(w A, clamp(w, 1-clip, 1+clip_high) A) + kl KL - entropy H`` per token (PPO, arXiv:1707.06347, eq. 7).

    ``w`` is the ratio of the policy to the one named by ``anchor``: ``rollout``, the engine that sampled, so rows may
    be older than the weights; ``sampling``, the same after top-k, top-p and min-p (``sampling_logprobs``); or ``old``,
    the trainer before the update (``old_logprobs``).

    Args:
        clip: how far the ratio may fall below 1, and rise above it where ``clip_high`` is None.
        clip_high: how far it may rise above 1 (clip-higher of DAPO, arXiv:2503.14476).
        dual: the most that a ratio counts where A < 0 (dual clip).
        kl: weight of the KL to ``ref_logprobs``, which must be there where it is not 0.
        kl_kind: its estimator, ``k1``, ``k2`` or ``k3``.
        entropy: weight of the entropy bonus.
        aggregate: how tokens become one number: ``token-mean``, ``token-sum``, ``seq-mean-token-mean``,
            ``seq-mean-token-sum``, ``seq-mean-token-sum-norm`` or ``prompt-mean``.
        parts: the others of :func:`flowrl.rl.policy_loss`: ``ratio``, ``correction``, ``only``, ``kl_bound``,
            ``kl_gradient``, ``kl_weighted`` and ``norm``.

    Reports ``ratio``, ``clip_fraction``, ``approx_kl`` (k3 from the anchor to now); ``kl``, ``entropy`` where asked.

    >>> rl.ppo_clip(clip_high=0.28, kl=1e-3)
    ppo_clip(ppo(low=0.2, high=0.28), kl=0.001)
    >>> rl.ppo_clip(anchor="old").reads
    'old_logprobs, advantages, response_mask'
    """
    gate = gates.ppo(clip, high=clip_high, dual=dual)
    said = {"kl": kl, "kl_kind": kl_kind, "entropy": entropy, "anchor": anchor, "aggregate": aggregate}
    return _made(gate, "ppo_clip", said, parts)


def gspo(*, clip: float = 3e-4, clip_high: float | None = 4e-4, **parts: Any) -> Loss:
    """The clipped loss of whole responses: w is the geometric mean of a row's ratios (arXiv:2507.18071, eq. 5-7).

    >>> rl.gspo()
    gspo(ppo(low=0.0003, high=0.0004), ratio=geometric, seq-mean-token-mean)
    """
    said = {"ratio": "geometric", "aggregate": "seq-mean-token-mean"}
    return _made(gates.ppo(clip, high=clip_high), "gspo", said, parts)


def cispo(*, high: float = 5.0, low: float = 0.0, **parts: Any) -> Loss:
    """Clipped weights, no clipped gradients: see :func:`flowrl.rl.gates.cispo`.

    >>> rl.cispo(high=4.0)
    cispo(cispo(low=0.0, high=4.0))
    """
    return _made(gates.cispo(high, low=low), "cispo", {}, parts)


def sapo(*, positive: float = 1.0, negative: float = 1.05, **parts: Any) -> Loss:
    """A soft gate instead of clipping: see :func:`flowrl.rl.gates.sapo`.

    >>> rl.sapo()
    sapo(sapo(positive=1.0, negative=1.05), seq-mean-token-mean)
    """
    return _made(gates.sapo(positive, negative), "sapo", {"aggregate": "seq-mean-token-mean"}, parts)


def gmpo(*, clip: float = 0.4, clip_high: float | None = None, **parts: Any) -> Loss:
    """The geometric mean of clipped ratios: see :func:`flowrl.rl.gates.gmpo`.

    >>> rl.gmpo()
    gmpo(gmpo(low=0.4, high=0.4), seq-mean-token-mean)
    """
    return _made(gates.gmpo(clip, high=clip_high), "gmpo", {"aggregate": "seq-mean-token-mean"}, parts)


def dppo(
    *, kind: str = "tv", clip: float = 0.15, clip_high: float | None = None, cap: float = 20.0, **parts: Any
) -> Loss:
    """A trust region in probabilities instead of ratios: see :func:`flowrl.rl.gates.dppo`.

    >>> rl.dppo(kind="kl", clip=0.05)
    dppo_kl(dppo(kind=kl, low=0.05, high=0.05, cap=20.0))
    """
    return _made(gates.dppo(kind, low=clip, high=clip_high, cap=cap), f"dppo_{kind}", {}, parts)


def vespo(
    *, positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0), **parts: Any
) -> Loss:
    """A soft weight of whole responses, largest near a ratio of 1: see :func:`flowrl.rl.gates.vespo`.

    >>> rl.vespo()
    vespo(vespo(positive=(2.0, 3.0), negative=(3.0, 2.0)), ratio=sequence)
    """
    return _made(gates.vespo(positive, negative), "vespo", {"ratio": "sequence"}, parts)


def m2po(*, only: str = "selected", **parts: Any) -> Loss:
    """``-w A`` for the tokens that :func:`flowrl.rl.select_by_second_moment` selected, 0 for others.

    M2PO, arXiv:2510.01161: no clipping; the tokens that moved furthest are left out.

    >>> rl.m2po().reads
    'rollout_logprobs, advantages, response_mask, selected: bool[*response]'
    """
    return _made(gates.surrogate(), "m2po", {"only": only}, parts)


def reinforce(*, correction: Part | str | Sequence[Part | str] = (), **parts: Any) -> Loss:
    """``-A log p`` per token (Williams 1992). It corrects for older rows only where a ``correction`` weighs them.

    >>> rl.reinforce(aggregate="seq-mean-token-sum")
    reinforce(reinforce(), seq-mean-token-sum)
    """
    return _made(gates.reinforce(), "reinforce", {"correction": correction}, parts)


def quadratic(*, temperature: float = 0.1, **parts: Any) -> Loss:
    """DRO, and Kimi's mirror descent: see :func:`flowrl.rl.gates.quadratic`.

    >>> rl.quadratic(temperature=0.1)
    quadratic(quadratic(temperature=0.1))
    """
    return _made(gates.quadratic(temperature), "quadratic", {}, parts)


def topr(*, low: float = 0.0, high: float = 1.0, **parts: Any) -> Loss:
    """Tapered off-policy REINFORCE: see :func:`flowrl.rl.gates.topr`.

    >>> rl.topr()
    topr(topr(low=0.0, high=1.0), ratio=sequence, seq-mean-token-sum)
    """
    return _made(gates.topr(low, high), "topr", {"ratio": "sequence", "aggregate": "seq-mean-token-sum"}, parts)


def clip_cov(*, clip: float = 1.0, **parts: Any) -> Loss:
    """Tokens whose covariance is high are left out: see :func:`flowrl.rl.gates.clip_cov`.

    >>> rl.clip_cov().reads
    'rollout_logprobs, advantages, response_mask, selected: bool[*response]'
    """
    return _made(gates.clip_cov(clip), "clip_cov", {}, parts)


def kl_cov(*, weight: float = 1.0, **parts: Any) -> Loss:
    """Tokens whose covariance is highest are held back: see :func:`flowrl.rl.gates.kl_cov`.

    >>> rl.kl_cov(weight=0.5)
    kl_cov(kl_cov(weight=0.5))
    """
    return _made(gates.kl_cov(weight), "kl_cov", {}, parts)


def decoupled_ppo(
    *, clip: float = 0.2, clip_high: float | None = None, anchor: str = "old", cap: float = 5.0, **parts: Any
) -> Loss:
    """``w min(u A, clamp(u, 1-clip, 1+clip_high) A)``, ``u = p / p_anchor``, ``w = min(p_anchor / p_rollout, cap)``.

    Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5): the trust region is around the trainer's policy
    before the update, and w corrects for the one that sampled. ``anchor`` is ``old`` or ``loglinear``.

    >>> rl.decoupled_ppo().reads
    'old_logprobs, rollout_logprobs, advantages, response_mask'
    """
    said = {"anchor": anchor, "correction": correct("token", "truncate", high=cap)}
    return _made(gates.ppo(clip, high=clip_high), "decoupled_ppo", said, parts)
