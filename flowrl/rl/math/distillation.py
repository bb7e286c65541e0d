"""Divergences of a student ``p`` from a teacher ``q``, in nats, of log-probabilities. See ``rl/distillation.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..loss_spec import LossInputs
from .kl import full, guarded

#: What pulls the student to a token that it never takes is not cut at the log-ratio where others are.
FURTHEST = 1000.0


def divergence(x: LossInputs, *, kind: str = "reverse_kl", beta: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence at each token [total]; see :func:`flowrl.rl.divergence`."""
    assert x.distribution is not None, "the loss asked for it"
    student, teacher = x.distribution, x["ref_distribution"].to(x.distribution.dtype)
    if kind == "reverse_kl":
        return full(student, teacher), {}
    if kind == "forward_kl":
        return forward(student, teacher), {}
    return jensen_shannon(student, teacher, float(beta)), {}


def forward(student: Tensor, teacher: Tensor) -> Tensor:
    """``sum_v q_v (log q_v - log p_v)``: [tokens, vocab] each to [tokens], with gradient.

    >>> forward(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log())
    tensor([0.1438])
    """
    away = torch.nan_to_num(teacher - student, nan=0.0, posinf=FURTHEST, neginf=-FURTHEST)
    return (teacher.exp() * away.clamp(-FURTHEST, FURTHEST)).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """``beta KL(q, m) + (1 - beta) KL(p, m)``, ``m = beta q + (1 - beta) p``: [tokens, vocab] each to [tokens].

    >>> jensen_shannon(torch.tensor([[0.0, 1.0]]).log(), torch.tensor([[1.0, 0.0]]).log(), 0.5).exp()
    tensor([2.0000])
    """
    away = guarded(teacher - student)
    mixed = above_student(away, beta)
    return (beta * teacher.exp() * (away - mixed) - (1 - beta) * student.exp() * mixed).sum(-1)


def above_student(away: Tensor, beta: float) -> Tensor:
    """``log(m / p) = log(beta exp(d) + 1 - beta)`` of ``d = log q - log p``, in its shape."""
    return torch.logaddexp(away + math.log(beta), torch.full_like(away, math.log1p(-beta)))


def by_sampled_token(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The advantage of each sampled token, in the inputs' shape; see :func:`flowrl.rl.teacher_advantages`.

    >>> by_sampled_token(torch.tensor([-2.0]), torch.tensor([-1.0]), "reverse_kl", 0.5)
    tensor([1.])
    """
    away = guarded(teacher - student)
    if kind == "reverse_kl":
        return away
    return away.expm1() if kind == "forward_kl" else (1 - beta) * above_student(away, beta)
