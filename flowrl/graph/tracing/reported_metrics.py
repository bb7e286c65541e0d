"""What updates report, as far as a trace knows: the names under which it is recorded, and those that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ...errors import At, FieldError, did_you_mean
from ..ops.function_spec import Spec
from ..stand_ins.values import MetricsValue
from .log_names import Logged
from .trace_records import TCall, TMetrics

#: Metrics that every update has, and those that it has or may have.
ALWAYS_REPORTED = ("loss", "grad_norm", "lr", "tokens", "rows", "steps")
UPDATES = (*ALWAYS_REPORTED, "truncated", "pretraining_loss")
#: Those that an update of a policy by advantages has or may have (docs/metrics.md).
OF_POLICY = ("entropy", "rollout_kl", "ratio_max", "ess", "clip_low", "clip_high", "silent_groups", "repetition")
#: Those that one by another loss on log-probabilities may have: where its rows were sampled.
OF_SAMPLED = ("entropy", "rollout_kl", "ratio_max", "ess", "repetition")


def recorded(item: Logged, calls: Sequence[TCall]) -> list[str]:
    """The names under which something is recorded. Of metrics those that every update has, and its loss reports."""
    if not item.is_metrics:
        return [item.name]
    if not isinstance(item.value, MetricsValue):
        made_by_hand = cast("Mapping[str, Any]", item.value)
        return [item.under(name) for name in made_by_hand]
    ref: TMetrics = item.value.ref
    loss: Any = calls[ref.call].arguments.get("loss")
    if not isinstance(loss, Spec):
        return []
    return [item.under(name) for name in (*ALWAYS_REPORTED, *getattr(loss, "reports", ()))]


def unknown_metric(ref: TMetrics, name: str, calls: Sequence[TCall], at: At) -> FieldError | None:
    """The error of a metric that an update does not report, where its loss says what it does; else None."""
    loss: Any = calls[ref.call].arguments.get("loss")
    told: tuple[str, ...] = getattr(loss, "reports", ())
    measured = OF_POLICY if getattr(loss, "of_policy", False) else OF_SAMPLED
    have = [*UPDATES, *told, *(measured if getattr(loss, "on", "") == "logprobs" else ())]
    if not told or name in have:
        return None
    fix = "Give kl= of the loss a weight above 0." if name == "kl" else did_you_mean(name, have)
    return FieldError(f"the metrics of {ref.title} have no '{name}'.", at=at, have=have, fix=fix)
