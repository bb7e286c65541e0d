"""Losses of a policy on rows that a policy sampled: one loss in orthogonal parts, and the published ones as presets.

    loss = Agg( w * gate(ratio, A) ) + kl * KL - entropy * H

``ratio`` is that of the policy to an *anchor*, per token or per row; the *gate* says how far it is followed; ``w``
corrects for the difference between the anchor and the policy that sampled. The mathematics is in ``math/policy.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ProgramError
from ..graph import session as sessions
from .said import KL_KINDS, is_zero, one_of
from .spec import Loss

REFERENCE = "ref_distribution: f32[*response, vocab]"
ANCHORS = ("rollout", "old", "loglinear")
RATIOS = ("token", "sequence", "geometric", "geometric-token")
LEVELS = ("token", "sequence", "geometric")
HOWS = ("weigh", "truncate", "clip", "mask", "reject", "veto")


@dataclass(frozen=True)
class Gate:
    """How far a loss follows its ratio: ``Gate("ppo", {"low": 0.2, "high": 0.28})``. Made by :mod:`flowrl.rl.gates`.

    ``follows``: it weighs by the ratio to the anchor. ``silent``: an advantage of 0 gives a gradient of 0.
    ``by_token``: it makes of the tokens' ratios what it needs, and takes no other. ``clips``: some tokens
    are held back, and ``clip_fraction`` says how many.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    follows: bool = True
    silent: bool = True
    reads: str = ""
    by_token: bool = False
    clips: bool = True

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.parameters.items() if value is not None]
        return f"{self.name}({', '.join(said)})"


@dataclass(frozen=True)
class Correction:
    """One factor of the weight ``w``: ``Correction("token", "truncate", high=2.0)``; see :func:`correct`."""

    level: str
    how: str
    low: float = 0.0
    high: float = float("inf")

    def __str__(self) -> str:
        return f"{self.how}({self.level}, low={self.low}, high={self.high})"


def correct(level: str = "token", how: str = "truncate", *, low: float = 0.0, high: float = 2.0) -> Correction:
    """A weight for rows that another policy sampled: ``w = exp(log p_anchor - log p_rollout)``, bounded.

    With the anchor ``rollout`` the policy itself stands in for the anchor, without gradient. Tokens that are left out
    keep their place in the denominator of the loss, so the others do not weigh more (as in AReaL).

    Args:
        level: ``token``; ``sequence``, the product over the row; or ``geometric``, its mean per token.
        how: ``weigh``: w. ``truncate``: ``min(w, high)`` (TIS). ``clip``: ``clamp(w, low, high)``. ``mask``: w inside
            ``[low, high]``, else 0 (IcePop; MIS). ``reject``: 1 inside, else 0. ``veto``: 0 for a whole row of which
            one token's ratio is below ``low``, else 1.
        low, high: bounds of w itself, not of its distance to 1 and not of its inverse.
    """
    one_of("rl.correct", "level", level, LEVELS)
    one_of("rl.correct", "how", how, HOWS)
    if not 0 <= low <= high:
        raise ProgramError(
            f"rl.correct: low={low}, high={high} are no bounds of a ratio.",
            at=sessions.caller(),
            fix="Give 0 <= low <= high; 1 is where both policies agree.",
        )
    return Correction(level, how, float(low), float(high))


def policy_loss(
    gate: Gate,
    *,
    ratio: str = "token",
    anchor: str = "rollout",
    correction: Correction | Sequence[Correction] = (),
    kl: float = 0.0,
    kl_kind: str = "k3",
    kl_weighted: bool = False,
    entropy: float = 0.0,
    aggregate: str = "token-mean",
    norm: float | None = None,
    name: str = "policy_loss",
) -> Loss:
    """``Agg(w * gate(ratio, A)) + kl KL - entropy H``, of which published losses are presets.

    Args:
        gate: one of :mod:`flowrl.rl.gates`.
        ratio: ``token``; ``sequence``, the product over a row's tokens; ``geometric``, their geometric mean (GSPO,
            arXiv:2507.18071); or ``geometric-token``, which has its value and the gradient of each token alone.
        anchor: whose policy the ratio is to. ``rollout``: the engine that sampled, so rows may be older than the
            weights. ``old``: the trainer before the update (``old_logprobs``). ``loglinear``: a policy between the
            two, without computing it: ``log p_rollout + a (log p - log p_rollout)``, ``a = (v - v_rollout) / (v + 1 -
            v_rollout)`` for weights of version v (AReaL).
        correction: factors of w, one or several; see :func:`correct`. With the anchor ``rollout`` a gate that follows
            the ratio corrects already, and takes factors that reject only.
        kl: weight of the KL to ``ref_logprobs``, which must be there where it is not 0.
        kl_kind: its estimator (see :mod:`flowrl.rl.math.kl`); or ``full``, the sum over the vocabulary, which reads
            ``ref_distribution`` instead and holds logits of all tokens.
        kl_weighted: multiply the KL by the ratio, which removes its bias off policy (DeepSeek-V3.2, section 3.1).
        entropy: weight of the entropy bonus.
        aggregate: how tokens become one number: ``token-mean``, ``token-sum``, ``seq-mean-token-mean``,
            ``seq-mean-token-sum`` or ``seq-mean-token-sum-norm``.
        norm: the tokens that ``seq-mean-token-sum-norm`` divides by.
        name: what the loss is called on the graph.

    Reports ``ratio``, ``clip_fraction``, ``approx_kl`` (k3 from the anchor to now); ``weight`` of a correction;
    ``kl``, ``entropy`` where asked. A log-ratio beyond 20 counts as 20 and has no gradient.
    """
    title = f"rl.{name}"
    one_of(title, "ratio", ratio, RATIOS)
    if gate.by_token and ratio != "token":
        raise ProgramError(
            f"{title}: the gate '{gate.name}' takes the ratio of each token, and was given ratio={ratio!r}.",
            at=sessions.caller(),
            fix="Leave out ratio=.",
        )
    one_of(title, "anchor", anchor, ANCHORS)
    one_of(title, "kl_kind", kl_kind, (*KL_KINDS, "full"))
    corrections = (correction,) if isinstance(correction, Correction) else tuple(correction)
    weighs = any(c.how not in ("reject", "veto") for c in corrections)
    if weighs and gate.follows and anchor == "rollout":
        raise ProgramError(
            f"{title}: the ratio is to the policy that sampled, and the correction would count it twice.",
            at=sessions.caller(),
            fix='Write anchor="old" (with actor.logprobs before), a correction that only rejects, or leave it out.',
        )
    return Loss(
        name=name,
        reads=_reads(gate, anchor, corrections, None if is_zero(kl) else kl_kind, kl_weighted),
        parameters={
            "gate": gate,
            "ratio": ratio,
            "anchor": anchor,
            "corrections": corrections,
            "kl": kl,
            "kl_kind": kl_kind,
            "kl_weighted": kl_weighted and not is_zero(kl),
            "entropy": entropy,
        },
        math="flowrl.rl.math.policy:policy_loss",
        aggregate=aggregate,
        norm=norm,
        needs_entropy=not is_zero(entropy),
        needs_distribution=kl_kind == "full" and not is_zero(kl),
        corrects_stale=weighs or (anchor == "rollout" and gate.follows),
        zero_advantage_is_zero=gate.silent and is_zero(kl) and is_zero(entropy),
        reports=(
            *(("ratio", "approx_kl") if gate.follows or (kl_weighted and not is_zero(kl)) else ()),
            *(("clip_fraction",) if gate.clips else ()),
            *(("weight",) if corrections else ()),
            *(() if is_zero(kl) else ("kl",)),
            *(() if is_zero(entropy) else ("entropy",)),
        ),
    )


def _reads(gate: Gate, anchor: str, corrections: Sequence[Correction], kl: str | None, kl_weighted: bool) -> str:
    fields: list[str] = []
    if gate.follows or corrections or (kl_weighted and kl):
        fields += {
            "rollout": ["rollout_logprobs"],
            "old": ["old_logprobs"],
            "loglinear": ["rollout_logprobs", "versions"],
        }[anchor]
    fields += ["rollout_logprobs"] if corrections else []
    fields += ["advantages", "response_mask", *([gate.reads] if gate.reads else [])]
    if kl:
        fields.append(REFERENCE if kl == "full" else "ref_logprobs")
    return ", ".join(dict.fromkeys(fields))
