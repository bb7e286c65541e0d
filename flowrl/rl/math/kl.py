"""Estimates of KL(p, q) from a sample of p and its log-probabilities (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ProgramError

#: Log-ratios beyond this count as this, and have no gradient.
BOUND = 20.0


def guarded(moved: Tensor) -> Tensor:
    """Log-ratios inside ``[-20, 20]``; 0 where there is none, as between two probabilities of 0."""
    return torch.nan_to_num(moved, nan=0.0, posinf=BOUND, neginf=-BOUND).clamp(-BOUND, BOUND)


def estimate(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """The KL from the policy to the reference at each token, in nats, in the inputs' shape; with gradient.

    With ``d = log q - log p``: ``k1 = -d`` (unbiased, may be negative), ``k2 = d^2 / 2`` (biased, small variance),
    ``k3 = exp(d) - 1 - d`` (unbiased, never negative). Raises ProgramError for another kind.

    >>> estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), "k1")
    tensor([1.])
    """
    difference = guarded(reference - logprobs)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return difference.expm1() - difference
    raise ProgramError(f"'{kind}' is no KL estimator.", fix="Write k1, k2 or k3.")


def full(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``sum_v p_v (log p_v - log q_v)`` over the vocabulary: [tokens, vocab] each to [tokens], in nats, with gradient.

    A token that p never takes adds nothing, whatever q says.

    >>> full(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log())
    tensor([0.1438])
    """
    return (logprobs.exp() * guarded(logprobs - reference)).sum(-1)


def loss_term(value: Tensor, bound: float | None, gradient: Tensor | None, weight: Tensor | None) -> Tensor:
    """``weight * clamp(value, -bound, bound)`` of each token; with ``gradient``, that one's gradient in its place.

    A value beyond the bound has no gradient of its own. The weight is differentiated too, so that an unbiased value has
    the gradient of the KL off policy; with ``gradient`` it is a constant, as that is an estimate of a gradient already.

    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> loss_term(x.exp(), 10.0, x.square() / 2, None).backward()
    >>> x.grad
    tensor([3.])
    """
    if bound is not None:
        value = value.clamp(-bound, bound)
    if gradient is not None:
        value = value.detach() + (gradient - gradient.detach())
        weight = None if weight is None else weight.detach()
    return value if weight is None else value * weight
