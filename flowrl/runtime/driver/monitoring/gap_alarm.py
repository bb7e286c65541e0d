"""When a run tells of the gap between the engine that samples and the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

#: Of the tokens compared, the share that may be beyond the bound of a token.
SHARE = 0.01
#: The mean difference of a token may be this part of the bound of a token.
MEAN = 0.2
CAUSES = (
    "a publish that did not arrive; weights, a dtype or a quantization that the engine has otherwise; a temperature or "
    "a support that one of the two leaves out; another template or tokenizer"
)
ADVICE = (
    "flowrl gap RUN, which takes rows of this run and says which one change explains it; the engine in the dtype of "
    "the trainer; until then rl.correct with a bound, so that no token weighs too much"
)


def gap_in(metrics: Any) -> dict[str, float]:
    """Return what an update has measured of the gap, by name; nothing where it has not measured any."""
    if not isinstance(metrics, Mapping) or "gap_bound" not in metrics:
        return {}
    return {name: value for name, value in metrics.items() if str(name).startswith("gap_")}


def is_beyond(gap: Mapping[str, float]) -> bool:
    """Return whether a gap is larger than rounding explains; a gap that is no number is."""
    if not gap["gap_tokens"]:
        return False
    return not (gap["gap_mean"] <= MEAN * gap["gap_bound"] and gap["gap_beyond"] <= SHARE)


class GapAlarm:
    """What is to be told, step by step: ``GapAlarm().look("grpo", 3, {"actor.update": gap})``.

    A gap is told of when it first is beyond its bounds, each time that its mean has doubled since, and when it is
    within them again.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}  # the mean that was last told
        self.rang = False  # whether there was a gap to tell of

    def look(self, program: str, step: Any, gaps: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        """Yield a line for each update whose gap is news. ``step`` is as the program logs it."""
        for node, gap in gaps.items():
            key, mean = (program, node), gap["gap_mean"]
            where = f"{program}: step {step}, {node}"
            if not is_beyond(gap):
                if gap["gap_tokens"] and self._told.pop(key, None) is not None:
                    yield f"{where}: the gap to the engine that sampled is within its bounds again"
            elif key not in self._told or mean >= 2 * self._told[key]:
                self._told[key] = mean if math.isfinite(mean) else math.inf
                self.rang = True
                yield f"{where}: {_describe(gap)}"


def _describe(gap: Mapping[str, float]) -> str:
    bound = gap["gap_bound"]
    return (
        "the engine that sampled and the trainer disagree at the same version of the weights. The log-probabilities "
        f"of {gap['gap_tokens']:.0f} sampled tokens differ by {gap['gap_mean']:.2g} on average, of which rounding "
        f"explains {MEAN * bound:.2g}; by {gap['gap_max']:.2g} at most; {gap['gap_beyond']:.1%} of them by more than "
        f"{bound:.2g}, of which rounding explains {SHARE:.0%}. Usual causes: {CAUSES}. Try: {ADVICE}"
    )
