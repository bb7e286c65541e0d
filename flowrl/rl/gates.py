"""How far a policy loss follows its ratio w, for an advantage A: ``rl.policy_loss(rl.gates.ppo(0.2))``.

Each gives a loss per token. ``sg`` has no gradient.
"""

from __future__ import annotations

from ..graph.ops.allowed import number, one_of
from ..graph.ops.check_arguments import takes
from .policy import Gate
from .validate import refusal

__all__ = [
    "cispo",
    "clip_cov",
    "dppo",
    "gmpo",
    "kl_cov",
    "ppo",
    "quadratic",
    "reinforce",
    "sapo",
    "surrogate",
    "topr",
    "vespo",
]

_CLIP = number(least=0, fix="Give how far the ratio may go, such as 0.2.")
_HIGH = number(least=0, finite=False)


@takes(clip=_CLIP, high=_HIGH, dual=number(above=1))
def ppo(clip: float = 0.2, *, high: float | None = None, dual: float | None = None) -> Gate:
    """``-min(w A, clamp(w, 1-clip, 1+high) A)``, at most ``-dual A`` where A < 0.

    arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729, eq. 5 (TRL's ``delta``).

    >>> rl.gates.ppo(0.2, dual=3.0).parameters
    {'low': 0.2, 'high': 0.2, 'dual': 3.0}
    """
    return Gate("ppo", {"low": clip, "high": clip if high is None else high, "dual": dual})


@takes(high=number(above=0, finite=False), low=number(least=0))
def cispo(high: float = 5.0, *, low: float = 0.0) -> Gate:
    """``-sg(clamp(w, low, high)) A log p``: every token keeps a gradient (MiniMax-M1, arXiv:2506.13585, eq. 4).

    The bounds are of the ratio itself, as in ScaleRL (arXiv:2510.13786), where the paper has 1 + eps.

    >>> rl.gates.cispo(4.0).parameters
    {'low': 0.0, 'high': 4.0}
    """
    return Gate("cispo", {"low": low, "high": high})


@takes(positive=number(above=0), negative=number(above=0))
def sapo(positive: float = 1.0, negative: float = 1.05) -> Gate:
    """``-(4 / t) sigmoid(t (w - 1)) A``, t being ``positive`` for A > 0, else ``negative`` (arXiv:2511.20347).

    >>> rl.gates.sapo().parameters
    {'positive': 1.0, 'negative': 1.05}
    """
    return Gate("sapo", {"positive": positive, "negative": negative}, clips=False)


@takes(clip=_CLIP, high=_HIGH)
def gmpo(clip: float = 0.4, *, high: float | None = None) -> Gate:
    """``-A exp(mean_t log w_t)``, each ``log w_t`` clipped to ``[-clip, high]`` where that lowers the objective.

    arXiv:2507.20673. A is the mean of the row's advantages; every token of a row has the row's number.

    >>> rl.gates.gmpo(0.4).parameters
    {'low': 0.4, 'high': 0.4}
    """
    return Gate("gmpo", {"low": clip, "high": clip if high is None else high}, by_token=True)


@takes(kind=one_of("tv", "kl"), low=_CLIP, high=_HIGH, cap=number(above=0, finite=False))
def dppo(kind: str = "tv", *, low: float = 0.15, high: float | None = None, cap: float = 20.0) -> Gate:
    """``-sg(min(w, cap)) A log p``, 0 for tokens that moved too far in the direction of A (arXiv:2602.04879).

    Too far is by the two-outcome divergence of p and the anchor's q at the sampled token: ``tv``: ``|p - q|``;
    ``kl``: ``q log(q/p) + (1-q) log((1-q)/(1-p))``. ``high`` bounds a rise, ``low`` a fall.

    >>> rl.gates.dppo("kl", low=0.05).parameters
    {'kind': 'kl', 'low': 0.05, 'high': 0.05, 'cap': 20.0}
    """
    return Gate("dppo", {"kind": kind, "low": low, "high": low if high is None else high, "cap": cap})


def vespo(positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)) -> Gate:
    """``-sg(w^k exp(l (1 - w))) A log p``, ``(k, l)`` being ``positive`` for A >= 0, else ``negative``.

    VESPO, arXiv:2602.10693. The weight is 1 where both policies agree. The paper's ratio is that of the whole response:
    ``ratio="sequence"``.

    >>> rl.policy_loss(rl.gates.vespo(), ratio="sequence")
    policy_loss(vespo(positive=(2.0, 3.0), negative=(3.0, 2.0)), ratio=sequence)
    """
    for name, pair in (("positive", positive), ("negative", negative)):
        if len(pair) != 2 or not min(pair) > 0:
            raise refusal(
                f"rl.gates.vespo: {name}={pair!r} is no power and rate of decay.",
                f"Give two numbers above 0, such as {name}=(2.0, 3.0).",
            )
    return Gate("vespo", {"positive": tuple(positive), "negative": tuple(negative)}, clips=False)


def surrogate() -> Gate:
    """``-w A``: the ratio is followed everywhere (TRPO, arXiv:1502.05477, eq. 14).

    >>> rl.policy_loss(rl.gates.surrogate())
    policy_loss(surrogate())
    """
    return Gate("surrogate", clips=False)


def reinforce() -> Gate:
    """``-A log p``: no ratio (Williams 1992; GPG, arXiv:2504.02546).

    >>> rl.gates.reinforce().follows
    False
    """
    return Gate("reinforce", follows=False, clips=False)


@takes(temperature=number(least=0))
def quadratic(temperature: float = 0.1) -> Gate:
    """``-A log p + (temperature / 2) (log w)^2``: DRO (arXiv:2405.19107), Kimi k1.5 (arXiv:2501.12599, eq. 3).

    >>> rl.gates.quadratic(0.1).parameters
    {'temperature': 0.1}
    """
    return Gate("quadratic", {"temperature": temperature}, silent=False, clips=False)


@takes(low=number(least=0), high=number(above=0, finite=False))
def topr(low: float = 0.0, high: float = 1.0) -> Gate:
    """``-A log p`` where A > 0, ``-sg(clamp(w, low, high)) A log p`` elsewhere (TOPR, arXiv:2503.14286, eq. 8).

    The paper's ratio is that of the whole response: ``ratio="sequence"``.

    >>> rl.gates.topr().parameters
    {'low': 0.0, 'high': 1.0}
    """
    return Gate("topr", {"low": low, "high": high})


@takes(clip=_CLIP)
def clip_cov(clip: float = 1.0) -> Gate:
    """``ppo(clip)``, 0 for the tokens that ``rl.select_by_covariance`` selected (arXiv:2505.22617, section 4.2).

    >>> rl.gates.clip_cov(0.2).reads
    'selected: bool[*response]'
    """
    return Gate("clip_cov", {"low": clip, "high": clip}, reads="selected: bool[*response]")


@takes(weight=number(least=0))
def kl_cov(weight: float = 1.0) -> Gate:
    """``-w A``, plus ``weight |log w|`` for the tokens that ``rl.select_by_covariance`` selected (arXiv:2505.22617).

    >>> rl.gates.kl_cov().reads
    'selected: bool[*response]'
    """
    return Gate("kl_cov", {"weight": weight}, silent=False, reads="selected: bool[*response]")
