"""Losses that learn what is given: the tokens of a response, or the returns of a state."""

from __future__ import annotations

from ..graph.ops.allowed import number
from ..graph.ops.check_arguments import takes
from .loss_spec import Loss


@takes(clip=number(above=0, fix="Give clip= a number above 0, or None for the plain square.") | None)
def value_clip(*, clip: float | None = 0.2, aggregate: str = "token-mean") -> Loss:
    """``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`` per token, of a critic.

    ``R`` are ``returns``, ``V_old`` the ``values`` that the returns were made with (the clipping is that of PPO's
    reference code); ``clip=None`` is the plain square. It is a regression on what the rows themselves returned, with
    no ratio in it, so rows may be older than the weights. Reports ``value_error`` and ``value_clip_fraction``.

    >>> rl.value_clip(clip=0.2).reads
    'values, returns, response_mask'
    """
    return Loss(
        name="value_clip",
        reads="values, returns, response_mask",
        parameters={"clip": clip},
        math="flowrl.rl.math.losses:value_clip",
        aggregate=aggregate,
        on="values",
        corrects_stale=True,
        foreign=True,
        reports=("value_error",) if clip is None else ("value_error", "value_clip_fraction"),
    )


def sft(*, aggregate: str = "token-mean") -> Loss:
    """``-log p`` of every token of ``response_mask``: supervised training.

    It asks not who wrote the tokens, so rows may be of any age.

    >>> rl.sft(aggregate="seq-mean-token-mean")
    sft(seq-mean-token-mean)
    """
    return Loss(
        name="sft",
        reads="response_mask",
        math="flowrl.rl.math.losses:sft",
        aggregate=aggregate,
        corrects_stale=True,
        foreign=True,
    )
