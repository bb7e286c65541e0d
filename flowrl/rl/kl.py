"""Estimates of KL(p, q) from a sample of p and its log-probabilities (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from torch import Tensor

from ..errors import ProgramError


def estimate(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """The KL from the policy to the reference at each token, in nats, in the inputs' shape; with gradient.

    With ``d = log q - log p``: ``k1 = -d`` (unbiased, may be negative), ``k2 = d^2 / 2`` (biased, small variance),
    ``k3 = exp(d) - 1 - d`` (unbiased, never negative). Raises ProgramError for another kind.

    >>> import torch
    >>> estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), "k1")
    tensor([1.])
    """
    difference = reference - logprobs
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return difference.expm1() - difference
    raise ProgramError(f"'{kind}' is no KL estimator.", fix="Write k1, k2 or k3.")
