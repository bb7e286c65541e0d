"""Losses of a policy on rows that a policy sampled: one loss in orthogonal parts, and the published ones as presets.

    loss = Agg( w * gate(ratio, A) + kl * KL - entropy * H )

``ratio`` is that of the policy to an *anchor*, per token or per row; the *gate* says how far it is followed; ``w``
corrects for the difference between the anchor and the policy that sampled (``corrections.py``). The mathematics is in
``math/policy.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph.ops.allowed import number
from .corrections import SAMPLERS, Part, fields_read, parts_of, reported_of_ratios
from .kl import check_kl, kl_remarks
from .loss_spec import Loss
from .validate import is_zero, one_of, refusal

REFERENCE = "ref_distribution: f32[*response, vocab]"
ANCHORS = ("rollout", "sampling", "old", "loglinear")
NARROW = 2e-3  # of a ratio of rows, in logarithms
RATIOS = ("token", "sequence", "geometric", "geometric-token")


@dataclass(frozen=True)
class Gate:
    """How far a loss follows its ratio: ``Gate("ppo", {"low": 0.2, "high": 0.28})``. Made by :mod:`flowrl.rl.gates`.

    ``follows``: it depends on the ratio to the anchor. ``silent``: an advantage of 0 gives a gradient of 0.
    ``by_token``: it makes of the tokens' ratios what it needs, and takes no other. ``clips``: some tokens
    are held back, and ``clip_fraction`` says how many.

    >>> rl.gates.ppo(0.2, high=0.28).parameters
    {'low': 0.2, 'high': 0.28, 'dual': None}
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


_ENTROPY = number(fix="Give entropy= the weight of the bonus, such as 0.001.")
_KL = number(least=0, fix="Give kl= the weight of the KL, such as 0.001.")


def policy_loss(
    gate: Gate,
    *,
    ratio: str = "token",
    anchor: str = "rollout",
    correction: Part | str | Sequence[Part | str] = (),
    only: str | None = None,
    kl: float = 0.0,
    kl_kind: str = "k3",
    kl_bound: float | None = None,
    kl_gradient: str | None = None,
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
            weights. ``sampling``: the same, over the tokens that could be drawn after top-k, top-p and min-p
            (``sampling_logprobs``), for an update with ``support=True``. ``old``: the trainer before the update
            (``old_logprobs``). ``loglinear``: a policy between the two, without computing it:
            ``log p_rollout + a (log p - log p_rollout)``, ``a = (v - v_rollout) / (v + 1 - v_rollout)`` for weights of
            version v (AReaL, whose code takes v - 1 for v).
        correction: factors of w, one or several: what :func:`correct` and :func:`reject` give, or the name of a field
            of weights (:func:`importance_weights`). With the anchor ``rollout`` a gate that follows the ratio corrects
            already, and takes factors that reject only.
        only: a field ``bool[*response]``: the gate counts where it is true. Other tokens stay in the denominator, and
            keep KL and entropy.
        kl: weight of the KL to ``ref_logprobs``, which must be there where it is not 0.
        kl_kind: its estimator (see :mod:`flowrl.rl.math.kl`); or ``full``, the sum over the vocabulary, which reads
            ``ref_distribution`` instead and holds logits of all tokens.
        kl_bound: the KL of a token counts as at most this, and as no less than its negative; beyond it has no gradient.
            verl bounds k3 by 10.
        kl_gradient: another estimator whose gradient takes the place of that of ``kl_kind``, without its bound; with
            ``k2`` it is the gradient of the KL (verl's ``k3+``: ``kl_kind="k3", kl_bound=10.0, kl_gradient="k2"``).
        kl_weighted: multiply the KL by the ratio to the policy that sampled (``rollout_logprobs`` where ``anchor`` is
            not one that sampled), which removes the bias of k1 and k3 off policy, and that of their gradients
            (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
        entropy: weight of the entropy bonus.
        aggregate: how tokens become one number: ``token-mean``, ``token-sum``, ``seq-mean-token-mean``,
            ``seq-mean-token-sum``, ``seq-mean-token-sum-norm`` or ``prompt-mean``.
        norm: the tokens that ``seq-mean-token-sum-norm`` divides by.
        name: what the loss is called on the graph.

    Reports ``ratio``, ``clip_fraction``, ``approx_kl`` (k3 from the anchor to now); ``weight`` of a correction, and of
    a ratio among its factors what it is before its bounds: ``correction_ratio``, ``correction_ratio_max``,
    ``correction_ess``, ``correction_beyond``, ``correction_beyond_rows``; ``selected_fraction`` of ``only``; ``kl``,
    ``entropy`` where asked. A log-ratio beyond 20 counts as 20 and has no gradient.

    >>> loss = rl.policy_loss(rl.gates.ppo(0.2, high=0.28), ratio="geometric", kl=1e-3)
    >>> loss
    policy_loss(ppo(low=0.2, high=0.28), ratio=geometric, kl=0.001)
    >>> loss.reads
    'rollout_logprobs, advantages, response_mask, ref_logprobs'
    """
    title, with_kl, with_entropy = f"rl.{name}", not is_zero(kl), not is_zero(entropy)
    kl_weighted = kl_weighted and with_kl
    corrections = parts_of(correction)
    _check_ratio(title, gate, ratio, anchor, corrections)
    check_kl(title, kl_kind, kl_bound, kl_gradient, weighted=kl_weighted)
    parts = {
        "gate": gate,
        "ratio": ratio,
        "anchor": anchor,
        "corrections": corrections,
        "only": only,
        "kl": kl,
        "kl_kind": kl_kind,
        "kl_bound": kl_bound,
        "kl_gradient": kl_gradient,
        "kl_weighted": kl_weighted,
        "entropy": entropy,
    }
    followed = gate.follows or (kl_weighted and anchor in SAMPLERS)  # the ratio to the anchor is computed
    weighs_kl = ("rollout_logprobs",) if kl_weighted and anchor not in SAMPLERS else ()
    return Loss(
        name=name,
        reads=_reads(gate, anchor, corrections, only, kl_kind if with_kl else None, followed=followed, also=weighs_kl),
        parameters=parts,
        allowed={"kl": _KL, "entropy": _ENTROPY},
        math="flowrl.rl.math.policy:policy_loss",
        aggregate=aggregate,
        norm=norm,
        needs_entropy=with_entropy,
        needs_distribution=kl_kind == "full" and with_kl,
        corrects_stale=_weighs(corrections) or (anchor in SAMPLERS and gate.follows),
        zero_advantage_is_zero=gate.silent and not with_kl and not with_entropy,
        reports=_reports(gate, corrections, only, followed=followed, kl=with_kl, entropy=with_entropy),
        remarks=(
            *(kl_remarks(title, kl_kind, kl_gradient, weighted=kl_weighted) if with_kl else ()),
            *_remarks_on_bounds(title, gate, ratio, anchor),
        ),
    )


def _check_ratio(title: str, gate: Gate, ratio: str, anchor: str, corrections: Sequence[Part]) -> None:
    """Raise ProgramError for a ratio that there is not, that the gate cannot take, or that would count twice."""
    one_of(title, "ratio", ratio, RATIOS)
    one_of(title, "anchor", anchor, ANCHORS)
    if gate.by_token and ratio != "token":
        raise refusal(
            f"{title}: the gate '{gate.name}' takes the ratio of each token, and was given ratio={ratio!r}.",
            "Leave out ratio=.",
        )
    if _weighs(corrections) and gate.follows and anchor in SAMPLERS:
        raise refusal(
            f"{title}: the ratio is to the policy that sampled, and the correction would count it twice.",
            'Write anchor="old" (with actor.logprobs before), a correction that only rejects, or leave it out.',
        )


def _remarks_on_bounds(title: str, gate: Gate, ratio: str, anchor: str) -> tuple[str, ...]:
    """What is to say of bounds that are narrower than what an engine and a trainer round differently.

    The means of 100 tokens' gaps of 0.005 nats, as in bf16, have a standard deviation of 6e-4 over rows.
    """
    low = gate.parameters.get("low")
    narrow = isinstance(low, (int, float)) and low < NARROW and ratio.startswith("geometric")
    if not narrow or anchor not in SAMPLERS:
        return ()
    return (
        f"{title}: rows are clipped beyond {low:g} of the engine's policy, and in bf16 engine and trainer round "
        'further apart than that. Write anchor="old", correction=rl.correct("token", "truncate"), with actor.logprobs '
        "before; or train in fp32.",
    )


def _weighs(corrections: Sequence[Part]) -> bool:
    return any(part.weighs for part in corrections)


def _reads(
    gate: Gate,
    anchor: str,
    corrections: Sequence[Part],
    only: str | None,
    kl: str | None,
    *,
    followed: bool,
    also: Sequence[str],
) -> str:
    anchored = {
        "rollout": ["rollout_logprobs"],
        "sampling": ["sampling_logprobs"],
        "old": ["old_logprobs"],
        "loglinear": ["rollout_logprobs", "versions"],
    }[anchor]
    fields = [*anchored] if followed else []
    fields += [*fields_read(corrections, anchored), *also]
    fields += ["advantages", "response_mask", *([gate.reads] if gate.reads else [])]
    if only:
        fields.append(f"{only}: bool[*response]")
    if kl:
        fields.append(REFERENCE if kl == "full" else "ref_logprobs")
    return ", ".join(dict.fromkeys(fields))


def _reports(
    gate: Gate, corrections: Sequence[Part], only: str | None, *, followed: bool, kl: bool, entropy: bool
) -> tuple[str, ...]:
    """The numbers that a loss of these parts reports, in their order."""
    names: list[str] = []
    names += ["ratio", "approx_kl"] if followed else []
    names += ["clip_fraction"] if gate.clips else []
    names += ["weight", *reported_of_ratios(corrections)] if corrections else []
    names += ["selected_fraction"] if only else []
    names += ["kl"] if kl else []
    names += ["entropy"] if entropy else []
    return tuple(names)
