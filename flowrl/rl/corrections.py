"""How a policy loss weighs rows that another policy sampled: the weight ``w``, of corrections and rejections.

    w = product of: a bounded ratio (``correct``), a rejection by divergence (``reject``), a field of weights

``rl.ppo_clip(anchor="old", correction=[rl.reject("k3", limit=0.1), rl.correct("token", "truncate", high=2.0)])``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING

from ..graph.ops import allowed
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import one_of, refusal

if TYPE_CHECKING:
    from ..batch import Batch, Column

LEVELS = ("token", "sequence", "geometric")
HOWS = ("weigh", "truncate", "clip", "mask", "reject", "veto")
DIVERGENCES = ("k1", "k2", "k3", "tv")
#: Of a divergence, which is a sum and not a product, the levels have other names.
OVER = ("token", "sequence", "mean", "max")
NORMALIZE = ("tokens", "rows", "none")
#: What is measured of a ratio before its bounds: its mean, the largest, the effective sample size as a share, and the
#: shares of tokens and of rows that are beyond the bounds.
OF_RATIO = ("ratio", "ratio_max", "ess", "beyond", "beyond_rows")
#: Anchors that are the policy that sampled.
SAMPLERS = ("rollout", "sampling")


@dataclass(frozen=True)
class Correction:
    """A bounded ratio as a factor of the weight: ``Correction("token", "truncate", high=2.0)``; see :func:`correct`.

    >>> rl.correct("token", "truncate", high=2.0).weighs
    True
    """

    level: str
    how: str
    low: float = 0.0
    high: float = float("inf")

    @property
    def weighs(self) -> bool:
        """Whether it weighs by the ratio; one that rejects does not."""
        return self.how not in ("reject", "veto")

    def __str__(self) -> str:
        return f"{self.how}({self.level}, low={self.low}, high={self.high})"


@dataclass(frozen=True)
class Rejection:
    """A factor of 1 or 0 by a divergence: ``Rejection("k3", "mean", 0.01)``; see :func:`reject`.

    >>> rl.reject("tv", "max", limit=0.2).limit
    0.2
    """

    divergence: str
    level: str
    limit: float
    negative: bool = False
    of: str = "anchor"

    weighs = False

    def __str__(self) -> str:
        rest = (", negative" if self.negative else "") + (f", of={self.of}" if self.of != "anchor" else "")
        return f"reject({self.divergence}, {self.level}, limit={self.limit}{rest})"


@dataclass(frozen=True)
class Weights:
    """A field of weights as a factor: ``Weights("importance_weights")``. A loss takes its name alone too."""

    field: str

    weighs = True

    def __str__(self) -> str:
        return f"weigh({self.field})"


Part = Correction | Rejection | Weights


#: The bounds that each way has a use for.
_BOUNDS = {"weigh": (), "truncate": ("high",), "veto": ("low",)}


@takes(level=allowed.one_of(*LEVELS), how=allowed.one_of(*HOWS))
def correct(
    level: str = "token", how: str = "truncate", *, low: float | None = None, high: float | None = None
) -> Correction:
    """A weight for rows that another policy sampled: ``w = exp(log p_anchor - log p_rollout)``, bounded.

    With the anchor ``rollout`` the policy itself stands in for the anchor, without gradient. Tokens that are left out
    keep their place in the denominator of the loss, so the others do not weigh more (as in AReaL).

    Args:
        level: ``token``; ``sequence``, the product over the row; or ``geometric``, its mean per token.
        how: ``weigh``: w. ``truncate``: ``min(w, high)`` (TIS). ``clip``: ``clamp(w, low, high)``. ``mask``: w inside
            ``[low, high]``, else 0 (IcePop; MIS). ``reject``: 1 inside, else 0. ``veto``: 0 for a whole row of which
            one token's ratio is below ``low``, else 1; it takes no other level.
        low, high: bounds of w itself, not of its distance to 1 and not of its inverse; 0 and 2 unless they are given.

    >>> rl.correct("token", "truncate", high=2.0)
    Correction(level='token', how='truncate', low=0.0, high=2.0)
    >>> rl.ppo_clip(anchor="old", correction=rl.correct("sequence", "mask", low=0.5, high=2.0)).reads
    'old_logprobs, rollout_logprobs, advantages, response_mask'
    """
    for name, bound, open_ in (("low", low, 0.0), ("high", high, float("inf"))):
        if bound not in (None, open_) and name not in _BOUNDS.get(how, (name,)):
            raise refusal(
                f"rl.correct: how='{how}' has no use for {name}={bound}.",
                f'Leave {name}= out, or write how="clip", "mask" or "reject", which have two bounds.',
            )
    if how == "veto" and level != "token":
        raise refusal(
            f"rl.correct: how='veto' looks at the ratio of each token, and has no use for level='{level}'.",
            f'Leave level= out, or write how="reject", which holds the ratio at level="{level}" against low= and '
            "high=.",
        )
    if how == "veto" and not low:
        raise refusal(
            "rl.correct: how='veto' leaves out rows with a ratio below low=, and none is below 0.",
            "Give low= the smallest ratio of a token that may be, such as 1e-4.",
        )
    low = 0.0 if low is None else low
    high = max(2.0, low) if high is None and how == "veto" else 2.0 if high is None else high
    if not 0 <= low <= high:
        raise refusal(
            f"rl.correct: low={low}, high={high} are no bounds of a ratio.",
            "Give 0 <= low <= high; 1 is where both policies agree.",
        )
    return Correction(level, how, float(low), float(high))


@takes(
    divergence=allowed.one_of(*DIVERGENCES),
    level=allowed.one_of(*OVER),
    limit=allowed.number(least=0, finite=False, fix="Give the largest divergence that stays, 0 or more."),
    of=allowed.one_of("anchor", "policy"),
)
def reject(
    divergence: str, level: str = "token", *, limit: float, negative: bool = False, of: str = "anchor"
) -> Rejection:
    """1 where the anchor is at most ``limit`` away from the policy that sampled, else 0.

    With ``d = log p_anchor - log p_rollout`` at the sampled token, estimates of KL(rollout, anchor): ``k1 = -d``,
    ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d``, in nats; and ``tv = |p_anchor - p_rollout|``, the total variation of two
    outcomes, this token or another, as in :func:`flowrl.rl.gates.dppo`. With the anchor ``rollout`` the policy itself
    stands in for the anchor. Tokens that are left out keep their place in the denominator of the loss.

    Args:
        divergence: ``k1``, ``k2``, ``k3`` or ``tv``.
        level: ``token``, or of the row's sampled tokens ``sequence``, the sum; ``mean``; or ``max``, the largest.
        limit: the largest divergence that stays.
        negative: leave out tokens with A < 0 alone.
        of: what is held against the policy that sampled: the ``anchor``, or the ``policy`` as it is in this pass.

    >>> rl.reject("k3", "mean", limit=0.01)
    Rejection(divergence='k3', level='mean', limit=0.01, negative=False, of='anchor')
    """
    return Rejection(divergence, level, float(limit), negative, of)


def off_policy_mask(limit: float = 0.5) -> Rejection:
    """0 for rows with A < 0 whose mean of ``log p_rollout - log p`` is beyond ``limit`` (DeepSeek-V3.2, eq. 9).

    It is ``rl.reject("k1", "mean", limit=limit, negative=True, of="policy")``; arXiv:2512.02556. The paper gives no
    number for the limit, which it calls delta; 0.5 is what TRL suggests.

    >>> rl.off_policy_mask(0.5)
    Rejection(divergence='k1', level='mean', limit=0.5, negative=True, of='policy')
    """
    return reject("k1", "mean", limit=limit, negative=True, of="policy")


def parts_of(correction: Part | str | Sequence[Part | str]) -> tuple[Part, ...]:
    """The factors that ``correction=`` names; a text is the name of a field of weights."""
    several = [correction] if isinstance(correction, (Correction, Rejection, Weights, str)) else correction
    return tuple(Weights(c) if isinstance(c, str) else c for c in several)


def ratio_names(corrections: Sequence[Part]) -> list[str]:
    """What each ratio among the factors is called in metrics: ``correction``, then ``correction2``."""
    count = sum(isinstance(part, Correction) for part in corrections)
    return [f"correction{number if number > 1 else ''}" for number in range(1, count + 1)]


def reported_of_ratios(corrections: Sequence[Part]) -> tuple[str, ...]:
    """What an update reports of the ratios among the factors, before their bounds."""
    return tuple(f"{name}_{measure}" for name in ratio_names(corrections) for measure in OF_RATIO)


def fields_read(corrections: Sequence[Part], anchored: Sequence[str]) -> list[str]:
    """What the factors read, besides the mask; ``anchored`` are the fields of the anchor."""
    fields: list[str] = []
    for part in corrections:
        if isinstance(part, Weights):
            fields.append(f"{part.field}: f32[*response]")
            continue
        sampler = "sampling_logprobs" if "sampling_logprobs" in anchored else "rollout_logprobs"
        fields += [*([] if isinstance(part, Rejection) and part.of == "policy" else anchored), sampler]
        if isinstance(part, Rejection) and part.negative:
            fields.append("advantages")
    return list(dict.fromkeys(fields))


def _weights_read(call: CallShape) -> str:
    one_of("rl.importance_weights", "normalize", call.call.get("normalize"), NORMALIZE)
    said = call.call.get("correction")
    parts = parts_of(correct() if said is None or said is Parameter.empty else said)  # asked before there is a call
    return ", ".join(dict.fromkeys(["old_logprobs", *fields_read(parts, ["old_logprobs"]), "response_mask"]))


@op(owner="rl", reads=_weights_read, adds="importance_weights: f32[*response]", cost="local")
def importance_weights(
    batch: Batch, *, correction: Part | str | Sequence[Part | str], normalize: str = "tokens"
) -> dict[str, Column]:
    """``w / mean(w)``, ``w = exp(log p_old - log p_rollout)`` bounded as ``correction`` says.

    A correction that a loss computes knows the rows of one pass; this one knows all rows of the batch, so it can divide
    by their mean. ``rl.ppo_clip(anchor="old", correction="importance_weights")`` weighs by it. Weighted importance
    sampling (Precup et al. 2000, "Eligibility traces for off-policy policy evaluation"); verl's
    ``rollout_is_batch_normalize``.

    Args:
        batch: reads ``old_logprobs``, ``response_mask``, and what the correction reads: ``rollout_logprobs``.
        correction: what :func:`correct` or :func:`reject` gives, one or several.
        normalize: ``tokens``: the mean over all sampled tokens becomes 1. ``rows``: the mean over rows of their means
            does, which is verl's for weights of whole rows. ``none``: w as it is.

    Where all weights are 0 they stay 0.

    >>> batch = fl.Batch.of(
    ...     1,
    ...     response_mask=fl.Column.of([[True, True]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-1.0, -2.0]], "response"),
    ...     old_logprobs=fl.Column.of([[-1.0, -1.0]], "response"),
    ... )
    >>> weights = rl.importance_weights(batch, correction=rl.correct("token", "truncate", high=2.0)).importance_weights
    >>> [round(w, 3) for w in weights.to_list()[0]]
    [0.667, 1.333]
    """
    from .loss_spec import LossInputs
    from .math.advantages import row_of
    from .math.corrections import correction_weights, normalized

    mask, device = batch.response_mask, batch.response_mask.values.device
    fields = {name: batch[name].values for name in batch.fields if name != "response_mask"}
    row = row_of(mask.lengths, len(mask.values), device)
    x = LossInputs(batch.old_logprobs.values, mask.values, fields, mask.lengths, row)
    weights = correction_weights(x, parts_of(correction), "old") * mask.values
    return {"importance_weights": mask.with_values(normalized(x, weights.double(), normalize).float())}
