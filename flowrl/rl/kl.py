"""Which parts the KL of a policy loss may have, and the remark on a choice whose gradient is not that of the KL."""

from __future__ import annotations

from typing import Any

from .validate import KL_KINDS, one_of, refusal

#: What verl calls its estimators, in the words of a policy loss.
_VERL = {
    "kl": 'kl_kind="k1"',
    "mse": 'kl_kind="k2"',
    "low_var_kl": 'kl_kind="k3", kl_bound=10.0',
    "k1+": 'kl_kind="k1", kl_gradient="k2"',
    "kl+": 'kl_kind="k1", kl_gradient="k2"',
    "k2+": 'kl_kind="k2"',
    "k3+": 'kl_kind="k3", kl_bound=10.0, kl_gradient="k2"',
    "low_var_kl+": 'kl_kind="k3", kl_bound=10.0, kl_gradient="k2"',
}


def check_kl(title: str, kind: str, bound: Any, gradient: str | None, *, weighted: bool) -> None:
    """Raise ProgramError at the driver's line for a KL that there is not, or that is not what it is taken for."""
    if kind in _VERL:
        known = ", ".join((*KL_KINDS, "full"))
        raise refusal(f"{title}: kl_kind={kind!r} is none of {known}.", f"Write {_VERL[kind]}.")
    one_of(title, "kl_kind", kind, (*KL_KINDS, "full"))
    if gradient is not None:
        one_of(title, "kl_gradient", gradient, KL_KINDS)
    if gradient is not None and kind == "full":
        raise refusal(
            f"{title}: kl_kind='full' is no estimate, and its gradient is that of the KL at each token; "
            f"kl_gradient='{gradient}' would put an estimate in its place.",
            "Leave out kl_gradient=.",
        )
    if isinstance(bound, (int, float)) and not bound > 0:
        raise refusal(
            f"{title}: kl_bound={bound} leaves nothing of the KL.",
            "Give the largest KL of a token in nats, such as 10.0, or leave it out.",
        )
    if weighted and kind == "k2" and gradient is None:
        raise refusal(
            f"{title}: kl_weighted=True does not remove the bias of kl_kind='k2': the ratio times k2 is an estimate of "
            "E[(log p - log ref)^2] / 2 under the policy, which is not the KL, and neither is its gradient.",
            'Write kl_kind="k3"; or kl_kind="k3", kl_gradient="k2", which weighs the gradient of k2 alone.',
        )


def kl_remarks(title: str, kind: str, gradient: str | None, *, weighted: bool) -> tuple[str, ...]:
    """What is to say of the gradient of this KL in a loss."""
    if (gradient or kind) != "k1" or (weighted and gradient is None):
        return ()
    return (
        f"{title}: the gradient of k1 is grad log p, whose mean over the policy's own samples is 0: this KL holds "
        'nothing back. Write kl_kind="k2" or "k3", or kl_weighted=True; or pay k1 from the reward (rl.kl_penalty).',
    )
