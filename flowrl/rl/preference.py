"""Losses on what is preferred: one row of a prompt over another, or single rows that are liked or not.

The better and the worse response to a prompt are two rows with keys ``(uid, 0)`` and ``(uid, 1)``, and a field
``preferred`` bool[] that is true for the better one, as :func:`flowrl.rl.pairs` makes them. Each row of a pair carries
the loss of the pair, so a mean over rows is a mean over pairs. A prompt that has not exactly one preferred row and one
other raises ProgramError. None of these losses asks who wrote the responses, so rows may be of any age. The mathematics
is in ``math/preference.py``.
"""

from __future__ import annotations

from typing import Any

from ..graph.ops.allowed import Allowed, number, one_of
from ..graph.ops.check_arguments import takes
from .loss_spec import Loss
from .validate import is_zero, refusal

_PREFERRED = "preferred: bool[], response_mask"
#: Kinds of a loss of pairs: of the difference of the two rows, or of how far each lies from the reference.
OF_DIFFERENCE = ("sigmoid", "robust", "hinge", "exo", "discopop", "ipo")
OF_EACH = ("sppo", "nca", "bco", "apo_zero", "apo_down")
SMOOTHED = ("sigmoid", "robust", "exo")


_BETA = number(above=0, fix="Write beta=0.1.")
_SMOOTHING = number(least=0, below=0.5, fix="Give a number from 0 to below 0.5; at 0.5 the preferences say nothing.")


def _weight(name: str) -> Allowed:
    return number(least=0, fix=f"Write {name}=0 to leave its part out.")


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
        foreign=True,
    )


@takes(
    kind=one_of(*OF_DIFFERENCE, *OF_EACH),
    beta=_BETA,
    label_smoothing=_SMOOTHING,
    nll=_weight("nll"),
    tau=number(above=0, fix="Write tau=0.05."),
)
def preference_loss(
    kind: str = "sigmoid",
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
    average: bool = False,
    margin: float = 0.0,
    nll: float = 0.0,
    tau: float = 0.05,
) -> Loss:
    """``f(beta h_w, beta h_l) - nll log p_w``, put together from parts; the named losses on pairs choose some of them.

    ``h`` is ``log p - log p_ref`` summed over the sampled tokens of the better row w and the worse row l, ``u = beta
    h_w``, ``v = beta h_l``, ``m = u - v - margin``, ``s`` the label smoothing.

    Args:
        kind: of the difference of the two rows,
            ``sigmoid``: ``-(1 - s) log sigmoid(m) - s log sigmoid(-m)`` (DPO, arXiv:2305.18290);
            ``robust``: ``(-(1 - s) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s)`` (arXiv:2403.00409);
            ``hinge``: ``max(0, 1 - m)`` (RSO, arXiv:2309.06657; without a reference SLiC-HF, arXiv:2305.10425);
            ``exo``: the KL of ``(sigmoid(m), sigmoid(-m))`` to ``(1 - s, s)``, s above 0 (arXiv:2402.00856, eq. 16);
            ``discopop``: ``(1 - g) (-log sigmoid(m)) + g exp(-m)``, ``g = sigmoid(m / tau)`` (arXiv:2406.08414, eq. 5;
            m below -20 counts as -20 in the exponential);
            ``ipo``: ``(h_w - h_l - 1 / (2 beta))^2`` (arXiv:2310.12036, eq. 17).
            Of how far each row lies from the reference,
            ``sppo``: ``(h_w - 1 / (2 beta))^2 + (h_l + 1 / (2 beta))^2`` (arXiv:2405.00675, eq. 4.7, of hard
            preferences);
            ``nca``: ``-log sigmoid(u) - (log sigmoid(-u) + log sigmoid(-v)) / 2`` (arXiv:2402.05369);
            ``bco``: ``-log sigmoid(u) - log sigmoid(-v)`` (arXiv:2404.04656, without its running shift of the rewards);
            ``apo_zero``: ``sigmoid(-u) + sigmoid(v)``; ``apo_down``: ``sigmoid(u) + sigmoid(v - u)``
            (arXiv:2408.06266, eq. 7 and 8).
        beta: how strongly the policy is held to the reference; above 0.
        label_smoothing: how likely a preference is the wrong way round; of ``sigmoid``, ``robust`` and ``exo``.
        reference_free: ``h`` is ``log p`` alone, and the loss reads no ``ref_logprobs``; of kinds of the difference.
        average: ``h`` is the mean over the row's sampled tokens.
        margin: by how much ``u`` shall lie above ``v``; of kinds of the difference but ``ipo``, which has its own.
        nll: weight of ``-log p`` of the better row, a mean over its sampled tokens.
        tau: how soft the change between the two losses of ``discopop`` is; above 0.

    Reads ``preferred``, and ``ref_logprobs`` unless ``reference_free=True``. Reports what :func:`dpo` does, and ``nll``
    where it has a weight.

    >>> rl.preference_loss("hinge", reference_free=True).reads
    'preferred: bool[], response_mask'
    """
    title = "rl.preference_loss"
    for name, said, kinds in (
        ("label_smoothing", label_smoothing, SMOOTHED),
        ("margin", margin, tuple(k for k in OF_DIFFERENCE if k != "ipo")),
        ("reference_free", reference_free, OF_DIFFERENCE),
    ):
        if kind not in kinds and not is_zero(said):
            raise refusal(
                f"{title}: {name}={said} is no part of kind={kind!r}.",
                f"Leave out {name}, or take one of {', '.join(kinds)}.",
            )
    if kind == "exo" and is_zero(label_smoothing):
        raise refusal(
            f"{title}: kind='exo' has no loss at label_smoothing=0, where the worse row may have no share at all.",
            "Write label_smoothing=0.001.",
        )
    parameters: dict[str, Any] = {
        "kind": kind,
        "beta": beta,
        "label_smoothing": label_smoothing,
        "reference_free": reference_free,
        "average": average,
        "margin": margin,
        "nll": nll,
    }
    if kind == "discopop":
        parameters["tau"] = tau
    reads = _PREFERRED if reference_free else f"ref_logprobs, {_PREFERRED}"
    return _loss("preference_loss", reads, parameters)


@takes(beta=_BETA, label_smoothing=_SMOOTHING)
def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """``-(1 - s) log sigmoid(m) - s log sigmoid(-m)``, ``m = beta (h_w - h_l)`` (DPO, arXiv:2305.18290, eq. 7).

    ``h`` is ``log p - log p_ref`` summed over the sampled tokens of the better row w and the worse row l. A row without
    one has 0; an update leaves such rows out, and raises ProgramError for their pair. A token's log-ratio beyond 1000
    counts as 1000 and has no gradient. Other kinds are parts of :func:`preference_loss`.

    Args:
        beta: how strongly the policy is held to the reference; above 0.
        label_smoothing: ``s``, how likely the preference is the wrong way round: conservative DPO (Mitchell, 2023,
            "A note on DPO with noisy preferences"; the unbiased loss of arXiv:2403.00409 is ``kind="robust"``). From 0
            to below 0.5.

    Reads ``ref_logprobs`` and ``preferred``. Reports ``chosen_reward`` and ``rejected_reward``, ``beta h`` of the two;
    ``reward_margin`` between them; ``reward_accuracy``, how often the chosen one is above.

    >>> rl.dpo(beta=0.05).reads
    'ref_logprobs, preferred: bool[], response_mask'
    """
    return _loss("dpo", f"ref_logprobs, {_PREFERRED}", {"beta": beta, "label_smoothing": label_smoothing})


@takes(beta=_BETA)
def ipo(*, beta: float = 0.1, average: bool = True) -> Loss:
    """``(h_w - h_l - 1 / (2 beta))^2`` (IPO, arXiv:2310.12036, eq. 17, where beta is called tau).

    ``h`` is as in :func:`dpo`, but the mean over the row's sampled tokens.

    Args:
        beta: the margin that is asked for is ``1 / (2 beta)``; above 0.
        average: ``h`` is a mean per token, a departure from the text of the paper that its authors name as what they
            ran (as in TRL); False takes the sum, as the equation does.

    Reads ``ref_logprobs`` and ``preferred``. Reports what :func:`dpo` does, of this ``h``.

    >>> rl.ipo()
    ipo(beta=0.1, average=True)
    """
    return _loss("ipo", f"ref_logprobs, {_PREFERRED}", {"beta": beta, "average": average})


@takes(beta=number(above=0, fix="Write beta=2.0."), margin=_weight("margin"))
def simpo(*, beta: float = 2.0, margin: float = 1.0) -> Loss:
    """``-log sigmoid(beta (m_w - m_l) - margin)`` (SimPO, arXiv:2405.14734, eq. 6, where the margin is called gamma).

    ``m`` is the mean log-probability over the sampled tokens of the better row w and the worse row l. There is no
    reference. TRL's ``simpo_gamma`` is this margin.

    Args:
        beta: above 0; far larger than that of :func:`dpo`, as ``m`` is a mean.
        margin: by how much ``beta m_w`` shall lie above ``beta m_l``; the paper's best are 0.3 to 0.5 of ``beta``.

    Reads ``preferred``. Reports what :func:`dpo` does, with ``beta m`` as the reward.

    >>> rl.simpo().reads
    'preferred: bool[], response_mask'
    """
    return _loss("simpo", _PREFERRED, {"beta": beta, "margin": margin})


@takes(beta=_BETA, nll=_weight("nll"), label_smoothing=_SMOOTHING)
def cpo(*, beta: float = 0.1, nll: float = 1.0, label_smoothing: float = 0.0) -> Loss:
    """``-log sigmoid(beta (log p_w - log p_l)) - nll log p_w`` (CPO, arXiv:2401.08417).

    The log-probabilities of the first term are sums over the sampled tokens of the better row w and the worse row l.
    There is no reference. The second term is a mean over the better row's sampled tokens and then over pairs, where the
    paper writes a sum; TRL's is a mean over all tokens, of the prompt too.

    Args:
        beta: above 0.
        nll: weight of the second term.
        label_smoothing: as of :func:`dpo`.

    Reads ``preferred``. Reports ``nll``, the second term, and what :func:`dpo` does, with ``beta log p`` as the reward.

    >>> rl.cpo()
    cpo(beta=0.1, nll=1.0)
    """
    return _loss("cpo", _PREFERRED, {"beta": beta, "nll": nll, "label_smoothing": label_smoothing})


@takes(weight=_weight("weight"))
def orpo(*, weight: float = 0.1) -> Loss:
    """``-m_w - weight log sigmoid(log odds(m_w) - log odds(m_l))`` (ORPO, arXiv:2403.07691, eq. 6 and 7).

    ``m`` is the mean log-probability over the sampled tokens of the better row w and the worse row l, and ``odds(m) =
    e^m / (1 - e^m)``. There is no reference. Log-odds from 20 on, as of a row without a sampled token, count as 20.
    The first term is of the response alone, and a mean over pairs; TRL's is over prompt and response, and over tokens.

    Args:
        weight: of the second term, the paper's lambda.

    Reads ``preferred``. Reports ``nll``, the first term; ``log_odds``, the difference of the two; and what :func:`dpo`
    does, with ``m`` as the reward.

    >>> rl.orpo(weight=0.2)
    orpo(weight=0.2)
    """
    return _loss("orpo", _PREFERRED, {"weight": weight})


@takes(beta=_BETA, desirable=_weight("desirable"), undesirable=_weight("undesirable"))
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

    >>> rl.kto(undesirable=2.0)
    kto(beta=0.1, desirable=1.0, undesirable=2.0)
    """
    parameters = {
        "beta": beta,
        "desirable": desirable,
        "undesirable": undesirable,
        "reference_point": reference_point,
    }
    return _loss("kto", f"ref_logprobs, {_PREFERRED}", parameters, groups=False)


@takes(center=_weight("center"))
def bradley_terry(*, margin: str | None = None, center: float = 0.0) -> Loss:
    """``-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2`` of a reward model (arXiv:2203.02155, eq. 1).

    ``r`` are its scores of the better row w and the worse row l.

    Args:
        margin: a field f32[], by how much the better one shall be above (Llama 2, arXiv:2307.09288, eq. 2); that of
            the preferred row counts.
        center: draws the scores of a pair to a mean of 0 (arXiv:2312.09244).

    Reads ``preferred``. Reports ``accuracy``, how often ``r_w`` is above, and ``margin``, ``r_w - r_l``.

    >>> rl.bradley_terry(center=0.01).reads
    'preferred: bool[], response_mask'
    """
    reads = _PREFERRED if margin is None else f"{_PREFERRED}, {margin}: f32[]"
    return _loss("bradley_terry", reads, {"margin": margin, "center": center}, on="scores")
