"""What in the curves of a run is told of: a table of rules, each with what is seen, its usual causes and what to try.

A rule looks at one number of a step, by the last part of its name: over the last :data:`WINDOW` steps, beside the
first and the best ones. Its bounds are rough on purpose: a rule that rings is worth a look, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 10  # steps


@dataclass(frozen=True)
class Curve:
    """A number over the steps: the first ones, the last ones, and how many there were: ``Curve([1.2], [0.1], 40)``.

    ``best`` is the highest mean that a window of steps had, ``moved`` the sum of all moves from a step to the next.
    """

    first: Sequence[float]
    last: Sequence[float]
    steps: int
    best: float = -math.inf
    moved: float = 0.0

    @property
    def before(self) -> float:
        """The mean of the first steps."""
        return sum(self.first) / len(self.first)

    @property
    def now(self) -> float:
        """The mean of the last steps."""
        return sum(self.last) / len(self.last)

    @property
    def noise(self) -> float:
        """The standard deviation of a step by its mean distance to the next one, to which a trend adds little."""
        return self.moved / max(1, self.steps - 1) / 1.128  # of normal numbers it is 2 / sqrt(pi) of the deviation

    @property
    def halves(self) -> tuple[float, float]:
        """The medians of the earlier and the later half of the last steps."""
        half = len(self.last) // 2
        return median(self.last[:half]), median(self.last[half:])

    @property
    def usual(self) -> float:
        """The median of the steps before the last one, without those that have no signal, of which a norm is 0.

        It is 0 where fewer than half of a window are left.
        """
        before = [value for value in self.last[:-1] if value]
        return median(before) if len(before) >= WINDOW // 2 else 0.0


@dataclass(frozen=True)
class Rule:
    """When to tell what: ``Rule("ess", True, lambda c: c.now < 0.3, "is {now:.2g}", "old rows", "less staleness")``.

    ``alarm``: training is going wrong; else it is a hint that something may be better. ``seen`` is filled with ``now``,
    ``before``, ``best``, the ``latest`` number, the ``median`` of the last ones and the ``usual`` of those before the
    latest. ``least``: steps before it is asked. ``unless``: it is not told while a rule on that number rings, which
    says the same.
    """

    metric: str
    alarm: bool
    rings: Callable[[Curve], bool]
    seen: str
    causes: str
    advice: str
    least: int = WINDOW
    unless: str = ""

    def tell(self, curve: Curve, name: str) -> str:
        """Return what is to be said of a curve."""
        figures = {"now": curve.now, "before": curve.before, "best": curve.best}
        figures |= {"latest": curve.last[-1], "median": median(curve.last), "usual": curve.usual}
        return f"{name} {self.seen.format(**figures)}. Usual causes: {self.causes}. Try: {self.advice}"


def _has_fallen(c: Curve) -> bool:
    """Whether half of what was gained is lost, a tenth of the best, and more than luck takes of the best window.

    A few bad steps lower the mean alone, rare rewards the median alone.
    """
    lost = c.best - max(c.now, median(c.last))
    return lost > max(0.5 * (c.best - c.before), 0.1 * abs(c.best), 3 * c.noise)


#: The KL to the reference of a loss with ``kl=``, and of one without.
_TO_REFERENCE = ("kl", "ref_kl")
_FAR = (
    "a kl= that is too small, or none; a learning rate that is too large; a reward that is higher where text is unlike "
    "that of the reference"
)

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
    *(
        Rule(
            name,
            True,
            lambda c: c.halves[1] > 2 * max(c.halves[0], c.before) and c.halves[1] > 1,
            "is {now:.2g} nats per token and has doubled in the last steps: the policy runs away from the reference",
            _FAR,
            "a look at trajectories.jsonl, whether the text still reads well; a smaller lr; a larger kl=; "
            "an earlier checkpoint",
            2 * WINDOW,
        )
        for name in _TO_REFERENCE
    ),
    Rule(
        "reward",
        True,
        _has_fallen,
        "has fallen to {now:.3g}, from {best:.3g} in its best steps ({before:.3g} in the first ones)",
        "a learning rate that is too large; a policy that has collapsed (its entropy and repetition say so); rows far "
        "from the policy; harder prompts; a reward function or a judge that fails",
        "an earlier checkpoint with a smaller lr; less staleness, fewer epochs; a small kl= in the loss; a look at the "
        "rewards in trajectories.jsonl and at events.jsonl",
        2 * WINDOW,
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
        lambda c: c.last[-1] > 10 * c.usual > 0,
        "is {latest:.3g}, more than ten times the median of the steps before, {usual:.3g}",
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
    *(
        Rule(
            name,
            False,
            lambda c: median(c.last) > 1 and c.now > 2 * c.before,
            "is {median:.2g} nats per token in the middle of the last steps: the policy is far from the reference",
            _FAR,
            "a look at trajectories.jsonl, whether the text still reads well; a larger kl= in the loss; a smaller lr",
            2 * WINDOW,
            unless=name,
        )
        for name in _TO_REFERENCE
    ),
    Rule(
        "ratio_max",
        False,
        lambda c: median(c.last) > 20,
        "is {median:.3g} in the middle of the last steps: single tokens are that much likelier now than when they were "
        "sampled",
        "rows far from the policy; an engine that computes other log-probabilities of rare tokens (its gap says so); "
        "ratios of whole sequences",
        "less staleness, fewer epochs or larger mini-batches; rl.correct with a bound; ratios by token; flowrl gap RUN",
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
        "response_truncated",
        False,
        lambda c: c.now > 0.3,
        "is {now:.0%}: that part of all responses that were sampled was cut off before a stop token",
        "a max_tokens that is too small; responses that grow because length pays; a stop token that is not learned",
        "a larger max_tokens; rl.overlong_penalty; a look at the ends of responses in trajectories.jsonl",
        unless="truncated",
    ),
    Rule(
        "response_length",
        False,
        lambda c: c.now > 3 * c.before,
        "has risen to {now:.0f} tokens, from {before:.0f} in the first steps",
        "a reward or a loss aggregate that favours long responses; a stop token that is not learned",
        "a look at trajectories.jsonl; another aggregate=; a penalty for length",
        2 * WINDOW,
    ),
    Rule(
        "response_length",
        False,
        lambda c: c.now < c.before / 3,
        "has fallen to {now:.0f} tokens, from {before:.0f} in the first steps",
        "a reward or a loss aggregate that favours short responses, such as a penalty for length; a policy that has "
        "collapsed (its entropy says so)",
        "a look at trajectories.jsonl, whether the short ones are right; a smaller penalty for length, or none; "
        "another aggregate=; a small kl= in the loss",
        2 * WINDOW,
    ),
)
