"""Losses on what is preferred: one row of a prompt over another, or single rows that are liked or not.

The better and the worse response to a prompt are two rows with keys ``(uid, 0)`` and ``(uid, 1)``, and a field
``preferred`` bool[] that is true for the better one, as :func:`flowrl.rl.pairs` makes them. Each row of a pair carries
the loss of the pair, so a mean over rows is a mean over pairs. A prompt that has not exactly one preferred row and one
other raises ProgramError. None of these losses asks who wrote the responses, so rows may be of any age. The mathematics
is in ``math/preference.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ProgramError
from ..graph import session as sessions
from .spec import Loss

_PREFERRED = "preferred: bool[], response_mask"


def _check(title: str, name: str, said: Any, fits: Callable[[float], bool], what: str, fix: str) -> None:
    """Refuse a number that makes no sense. One that the program computes is not looked at."""
    if isinstance(said, (int, float)) and not fits(said):
        raise ProgramError(f"{title}: {name}={said} {what}.", at=sessions.caller(), fix=fix)


def _positive(title: str, name: str, said: Any) -> None:
    _check(title, name, said, lambda n: n > 0, "is not above 0", f"Write {name}=0.1.")


def _not_negative(title: str, name: str, said: Any) -> None:
    _check(title, name, said, lambda n: n >= 0, "is below 0", f"Write {name}=0 to leave its part out.")


def _loss(name: str, reads: str, parameters: dict[str, Any], *, on: str = "logprobs", groups: bool = True) -> Loss:
    return Loss(
        name=name,
        reads=reads,
        parameters=parameters,
        math=f"flowrl.rl.math.preference:{name}",
        aggregate="row-mean",
        on=on,
        per="row",
        groups=groups,
        corrects_stale=True,  # it does not ask who sampled
    )


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """``-(1 - s) log sigmoid(m) - s log sigmoid(-m)``, ``m = beta (h_w - h_l)`` (DPO, arXiv:2305.18290, eq. 7).

    ``h`` is ``log p - log p_ref`` summed over the sampled tokens of the better row w and the worse row l. A row without
    one has 0; an update leaves such rows out, and raises ProgramError for their pair. A token's log-ratio beyond 1000
    counts as 1000 and has no gradient.

    Args:
        beta: how strongly the policy is held to the reference; above 0.
        label_smoothing: ``s``, how likely the preference is the wrong way round: conservative DPO (Mitchell, 2023,
            "A note on DPO with noisy preferences"; not the unbiased loss of arXiv:2403.00409). From 0 to below 0.5.

    Reads ``ref_logprobs`` and ``preferred``. Reports ``chosen_reward`` and ``rejected_reward``, ``beta h`` of the two;
    ``reward_margin`` between them; ``reward_accuracy``, how often the chosen one is above.
    """
    _positive("rl.dpo", "beta", beta)
    _check(
        "rl.dpo",
        "label_smoothing",
        label_smoothing,
        lambda s: 0 <= s < 0.5,
        "is no share of wrong preferences",
        "Give a number from 0 to below 0.5; at 0.5 the preferences say nothing.",
    )
    return _loss("dpo", f"ref_logprobs, {_PREFERRED}", {"beta": beta, "label_smoothing": label_smoothing})


def ipo(*, beta: float = 0.1, average: bool = True) -> Loss:
    """``(h_w - h_l - 1 / (2 beta))^2`` (IPO, arXiv:2310.12036, eq. 17, where beta is called tau).

    ``h`` is as in :func:`dpo`, but the mean over the row's sampled tokens.

    Args:
        beta: the margin that is asked for is ``1 / (2 beta)``; above 0.
        average: ``h`` is a mean per token, a departure from the text of the paper that its authors name as what they
            ran (as in TRL); False takes the sum, as the equation does.

    Reads ``ref_logprobs`` and ``preferred``. Reports what :func:`dpo` does, of this ``h``.
    """
    _positive("rl.ipo", "beta", beta)
    return _loss("ipo", f"ref_logprobs, {_PREFERRED}", {"beta": beta, "average": average})


def orpo(*, weight: float = 0.1) -> Loss:
    """``-m_w - weight log sigmoid(log odds(m_w) - log odds(m_l))`` (ORPO, arXiv:2403.07691, eq. 6 and 7).

    ``m`` is the mean log-probability over the sampled tokens of the better row w and the worse row l, and ``odds(m) =
    e^m / (1 - e^m)``. There is no reference. Log-odds from 20 on, as of a row without a sampled token, count as 20.
    The first term is of the response alone, and a mean over pairs; TRL's is over prompt and response, and over tokens.

    Args:
        weight: of the second term, the paper's lambda.

    Reads ``preferred``. Reports ``nll``, the first term; ``log_odds``, the difference of the two; and what :func:`dpo`
    does, with ``m`` as the reward.
    """
    _not_negative("rl.orpo", "weight", weight)
    return _loss("orpo", _PREFERRED, {"weight": weight})


def kto(*, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0, reference_point: float = 0.0) -> Loss:
    """``desirable (1 - sigmoid(beta (h - z0)))`` of a preferred row, ``undesirable (1 - sigmoid(beta (z0 - h)))`` else.

    KTO, arXiv:2402.01306. ``h`` is as in :func:`dpo`. Rows stand alone: a prompt may have any number of either.

    Args:
        beta: how fast gains and losses wear off; above 0.
        desirable, undesirable: what the two kinds of rows weigh.
        reference_point: ``z0``, an estimate of the KL to the reference; below 0 it counts as 0. The program may compute
            it: the mean of ``h`` over rows of :func:`flowrl.rl.mismatched`.

    Reads ``ref_logprobs`` and ``preferred``. Reports ``reward``, ``beta h``, and ``reward_accuracy``, how often a row
    lies on its side of ``z0``.
    """
    _positive("rl.kto", "beta", beta)
    _not_negative("rl.kto", "desirable", desirable)
    _not_negative("rl.kto", "undesirable", undesirable)
    parameters = {
        "beta": beta,
        "desirable": desirable,
        "undesirable": undesirable,
        "reference_point": reference_point,
    }
    return _loss("kto", f"ref_logprobs, {_PREFERRED}", parameters, groups=False)


def bradley_terry(*, margin: str | None = None, center: float = 0.0) -> Loss:
    """``-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2`` of a reward model (arXiv:2203.02155, eq. 1).

    ``r`` are its scores of the better row w and the worse row l.

    Args:
        margin: a field f32[], by how much the better one shall be above (Llama 2, arXiv:2307.09288, eq. 2); that of
            the preferred row counts.
        center: draws the scores of a pair to a mean of 0 (arXiv:2312.09244).

    Reads ``preferred``. Reports ``accuracy``, how often ``r_w`` is above, and ``margin``, ``r_w - r_l``.
    """
    _not_negative("rl.bradley_terry", "center", center)
    reads = _PREFERRED if margin is None else f"{_PREFERRED}, {margin}: f32[]"
    return _loss("bradley_terry", reads, {"margin": margin, "center": center}, on="scores")
