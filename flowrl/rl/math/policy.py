"""The policy loss in parts: ratio, gate, correction, KL and entropy; see :func:`flowrl.rl.policy_loss`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..corrections import SAMPLERS
from ..loss_spec import LossInputs
from .corrections import weights_and_ratios
from .gates import GATES
from .kl import estimate, full, loss_term
from .ratio import moved_from

if TYPE_CHECKING:
    from ..corrections import Part
    from ..policy import Gate


def policy_loss(
    x: LossInputs,
    *,
    gate: Gate,
    ratio: str,
    anchor: str,
    corrections: Sequence[Part],
    only: str | None,
    kl: float,
    kl_kind: str,
    kl_bound: float | None,
    kl_gradient: str | None,
    kl_weighted: bool,
    entropy: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token [total], and what it reports [total]."""
    advantages, reports = x["advantages"], dict[str, Tensor]()
    referred = "ref_logprobs" in x.fields if kl_kind != "full" else x.distribution is not None
    moved = weight_of_kl = None
    if gate.follows or (kl_weighted and referred and anchor in SAMPLERS):
        moved = moved_from(x, anchor, ratio)
        before = moved.before
        reports |= {"ratio": moved.ratio.detach(), "approx_kl": estimate(before, x.predicted.detach(), "k3")}
    loss, clipped = GATES[gate.name](x, moved, advantages, **gate.parameters)
    if clipped is not None:
        reports["clip_fraction"] = clipped.to(loss.dtype).detach()
    if corrections:
        reports["weight"], before_bounds = weights_and_ratios(x, corrections, anchor)
        reports |= before_bounds
        loss = loss * reports["weight"]
    if only is not None:
        reports["selected_fraction"] = x[only].to(loss.dtype)
        loss = loss * reports["selected_fraction"]
    if referred:
        if kl_weighted:  # by the policy that sampled, whatever the gate's ratio is to
            sampler = moved if moved is not None and anchor in SAMPLERS else moved_from(x, "rollout", ratio)
            weight_of_kl = sampler.ratio
        divergence = loss_term(_kl(x, kl_kind), kl_bound, _kl(x, kl_gradient) if kl_gradient else None, weight_of_kl)
        loss = loss + kl * divergence
        reports["kl"] = divergence.detach()
    if x.entropy is not None:
        loss = loss - entropy * x.entropy
        reports["entropy"] = x.entropy.detach()
    return loss, reports


def _kl(x: LossInputs, kind: str) -> Tensor:
    """The KL to the reference at each token [total], with gradient."""
    if kind != "full":
        return estimate(x.predicted, x["ref_logprobs"], kind)
    assert x.distribution is not None, "the loss asked for it"
    return full(x.distribution, x["ref_distribution"])
