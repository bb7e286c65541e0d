"""Learning from a teacher's distribution: losses over the whole vocabulary, and advantages of sampled tokens.

``p`` is the student, ``q`` the teacher, both given the same row. The mathematics is in ``math/distillation.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .loss_spec import Loss
from .validate import ANCHORS, one_of, refusal

if TYPE_CHECKING:
    from ..batch import Batch, Column

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def _check(title: str, kind: Any, beta: Any) -> None:
    one_of(title, "kind", kind, DIVERGENCES)
    if isinstance(beta, (int, float)) and not 0 < beta < 1:
        raise refusal(
            f"{title}: beta={beta} is not between 0 and 1.",
            'Write kind="forward_kl" for the limit at 0, kind="reverse_kl" for that at 1.',
        )


def full_kl(*, aggregate: str = "token-mean") -> Loss:
    """``KL(p, q) = sum_v p_v (log p_v - log q_v)`` per token: a student p on its own tokens, a teacher's q.

    On-policy distillation with the whole distribution (GKD, arXiv:2306.13649, reverse KL). It reads
    ``ref_distribution`` (``teacher.distribution(batch)``). It asks not who wrote the tokens, so rows may be of any age.
    It is :func:`divergence` with its default.

    >>> rl.full_kl().reads
    'ref_distribution: f32[*response, vocab], response_mask'
    """
    return _loss("full_kl", {}, aggregate)


def divergence(kind: str = "reverse_kl", *, beta: float = 0.5, aggregate: str = "token-mean") -> Loss:
    """How far the student's distribution lies from the teacher's, per token (GKD, arXiv:2306.13649, eq. 1).

    It asks not who wrote the tokens, so rows may be of any age, and may be given ones: the teacher's, or the data's.

    Args:
        kind: ``reverse_kl``, ``sum_v p_v (log p_v - log q_v)``: the student leaves out what it cannot do.
            ``forward_kl``, ``sum_v q_v (log q_v - log p_v)``: it covers all that the teacher does.
            ``jsd``, ``beta KL(q, m) + (1 - beta) KL(p, m)`` with ``m = beta q + (1 - beta) p``: between the two, and
            at most ``log 2``.
        beta: of ``jsd``, above 0 and below 1. Divided by ``beta``, the loss goes to the forward KL at 0; by
            ``1 - beta``, to the reverse KL at 1. TRL's ``beta`` is the same, with the two KLs at 0 and 1.
        aggregate: as of :func:`flowrl.rl.sft`.

    Reads ``ref_distribution`` and ``response_mask``. A log-ratio beyond 20 counts as 20; in ``forward_kl``, where it is
    what pulls the student to a token that it never takes, beyond 1000 as 1000.

    >>> rl.divergence("jsd", beta=0.1)
    divergence(kind=jsd, beta=0.1)
    """
    _check("rl.divergence", kind, beta)
    return _loss("divergence", {"kind": kind} | ({"beta": beta} if kind == "jsd" else {}), aggregate)


def _loss(name: str, parameters: dict[str, Any], aggregate: str) -> Loss:
    return Loss(
        name=name,
        reads="ref_distribution: f32[*response, vocab], response_mask",
        parameters=parameters,
        math="flowrl.rl.math.distillation:divergence",
        aggregate=aggregate,
        needs_distribution=True,
        corrects_stale=True,
        foreign=True,
    )


def _teacher_reads(call: CallShape) -> str:
    _check("rl.teacher_advantages", call.call.get("kind"), call.call.get("beta"))
    anchor = one_of("rl.teacher_advantages", "anchor", call.call.get("anchor"), ANCHORS)
    return f"{anchor}_logprobs, ref_logprobs, response_mask"


@op(owner="rl", reads=_teacher_reads, adds="advantages: f32[*response]", cost="local", pieces=True)
def teacher_advantages(
    batch: Batch, *, kind: str = "reverse_kl", beta: float = 0.5, anchor: str = "rollout"
) -> dict[str, Column]:
    """Advantages of sampled tokens, whose policy gradient is, on average, that of a divergence to the teacher.

    For a teacher that gives log-probabilities of tokens alone (``teacher.logprobs(batch)``), and rows that the student
    sampled. The divergence is that at each token: what a token does to later ones does not count (GKD,
    arXiv:2306.13649). ``d = log q - log p`` of the sampled token.

    Args:
        batch: reads ``ref_logprobs``, ``response_mask``, and ``rollout_logprobs`` or ``old_logprobs``.
        kind: ``reverse_kl``: ``A = d``. ``forward_kl``: ``A = exp(d) - 1``, which has a large variance where teacher
            and student are far apart, as the student must happen to sample what the teacher wants. ``jsd``:
            ``A = (1 - beta) log(beta exp(d) + 1 - beta)``. They are those of :func:`divergence`.
        beta: of ``jsd``.
        anchor: whose log-probabilities are the student's: ``rollout``, ``sampling`` or ``old``.

    A log-ratio beyond 20 counts as 20.

    >>> batch = fl.Batch.of(
    ...     1,
    ...     response_mask=fl.Column.of([[True, True]], "response"),
    ...     rollout_logprobs=fl.Column.of([[-1.0, -2.0]], "response"),
    ...     ref_logprobs=fl.Column.of([[-2.0, -2.0]], "response"),
    ... )
    >>> rl.teacher_advantages(batch).advantages.to_list()
    [[-1.0, 0.0]]
    """
    from .math.distillation import by_sampled_token

    ref, mask = batch.ref_logprobs, batch.response_mask.values
    found = by_sampled_token(batch[f"{anchor}_logprobs"].values, ref.values, kind, float(beta))
    return {"advantages": ref.with_values((found * mask).float())}
