"""What in the curves of a run is told of: a table of rules, each with what is seen, its usual causes and what to try.

A rule looks at one number of an update, by the last part of its name: over the last :data:`WINDOW` steps, beside the
first ones. Its bounds are rough on purpose: a rule that rings is worth a look, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 10  # steps


@dataclass(frozen=True)
class Curve:
    """A number over the steps: the first ones, the last ones, and how many there were: ``Curve([1.2], [0.1], 40)``."""

    first: Sequence[float]
    last: Sequence[float]
    steps: int

    @property
    def before(self) -> float:
        """The mean of the first steps."""
        return sum(self.first) / len(self.first)

    @property
    def now(self) -> float:
        """The mean of the last steps."""
        return sum(self.last) / len(self.last)


@dataclass(frozen=True)
class Rule:
    """When to tell what: ``Rule("ess", True, lambda c: c.now < 0.3, "is {now:.2g}", "old rows", "less staleness")``.

    ``alarm``: training is going wrong; else it is a hint that something may be better. ``seen`` is filled with ``now``,
    ``before``, the ``latest`` number and the ``median`` of the last ones. ``least``: steps before it is asked.
    """

    metric: str
    alarm: bool
    rings: Callable[[Curve], bool]
    seen: str
    causes: str
    advice: str
    least: int = WINDOW

    def tell(self, curve: Curve, name: str) -> str:
        """Return what is to be said of a curve."""
        figures = {"now": curve.now, "before": curve.before, "latest": curve.last[-1], "median": median(curve.last)}
        return f"{name} {self.seen.format(**figures)}. Usual causes: {self.causes}. Try: {self.advice}"


#: Alarms first.
RULES = (
    Rule(
        "entropy",
        True,
        lambda c: c.now < 0.1 * c.before and c.now < 0.3,
        "has fallen to {now:.2g} nats per token, from {before:.2g} in the first steps: the policy hardly varies",
        "a learning rate that is too large; a clip that keeps rare tokens from becoming likely; a reward that "
        "one answer satisfies",
        "a smaller lr; a larger upper clip (clip_high of DAPO); a small entropy= or kl= in the loss",
        2 * WINDOW,
    ),
    Rule(
        "entropy",
        True,
        lambda c: c.now > 2 * c.before and c.now > c.before + 1,
        "has risen to {now:.2g} nats per token, from {before:.2g} in the first steps: the policy becomes noise",
        "a learning rate that is too large; an entropy bonus that outweighs the reward; rows far from the policy",
        "a smaller lr; a smaller entropy= in the loss; less staleness, fewer epochs",
        2 * WINDOW,
    ),
    Rule(
        "rollout_kl",
        True,
        lambda c: median(c.last) > 0.1,
        "is {median:.2g} nats per token in the middle of the last steps: rows come from a policy far from this one",
        "too much staleness or too many steps on the same rows; a learning rate that is too large; an engine that "
        "computes other log-probabilities (its gap says so)",
        "less staleness, fewer epochs or larger mini-batches; a smaller lr; flowrl gap RUN",
    ),
    Rule(
        "ess",
        True,
        lambda c: median(c.last) < 0.3,
        "is {median:.2g} in the middle of the last steps: few tokens carry most of the weight of the ratios",
        "rows far from the policy; ratios of whole sequences; ratios without a bound",
        "less staleness, fewer epochs; ratios by token; a correction with a bound",
    ),
    Rule(
        "grad_norm",
        True,
        lambda c: c.last[-1] > 10 * median(c.last[:-1]) > 0,
        "is {latest:.3g}, ten times what it was in the steps before ({median:.3g} in their middle)",
        "a row that is unlike the others; a ratio or an advantage without a bound; a learning rate at its limit",
        "grad_clip=1.0; a look at the rows of this step, with --trajectories-every 1; a smaller lr",
    ),
    Rule(
        "repetition",
        True,
        lambda c: c.now > 0.3 and c.now > 2 * c.before,
        "has risen to {now:.0%} of all sequences of four tokens, from {before:.0%}: responses repeat themselves",
        "a reward that grows with length; a policy that has collapsed; a stop token that is not learned or not sampled",
        "a look at trajectories.jsonl; a penalty for length; an earlier checkpoint with a smaller lr",
        2 * WINDOW,
    ),
    Rule(
        "clip_fraction",
        False,
        lambda c: c.now > 0.3,
        "is {now:.0%}: that part of the tokens teaches nothing, as it is beyond the clip",
        "too many steps on the same rows; a learning rate that is too large; staleness",
        "fewer epochs or larger mini-batches; a smaller lr; less staleness; a wider clip",
    ),
    Rule(
        "silent_groups",
        False,
        lambda c: c.now > 0.8,
        "is {now:.0%}: in that part of the prompts all responses have the same advantage, so they teach nothing",
        "prompts that are too easy or too hard; too few responses of each; rewards that are nearly always equal",
        "more responses per prompt; prompts of middle difficulty; leaving such groups out and sampling more",
    ),
    Rule(
        "truncated",
        False,
        lambda c: c.now > 0.3,
        "is {now:.0%}: that part of the responses was cut off before it ended",
        "a max_tokens that is too small; responses that grow because length pays",
        'a larger max_tokens; rl.overlong_penalty; rl.where("finished", loss), which leaves them out',
    ),
    Rule(
        "response_length",
        False,
        lambda c: c.now > 3 * c.before or c.now < c.before / 3,
        "is {now:.0f} tokens, {before:.0f} in the first steps",
        "a reward or a loss aggregate that favours long or short responses",
        "a look at trajectories.jsonl; another aggregate=; a penalty for length",
        2 * WINDOW,
    ),
)
