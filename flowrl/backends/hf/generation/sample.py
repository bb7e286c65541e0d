"""Drawing the next tokens of rows from their hidden states, a bounded part of the logits at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ....workers.model_options import Sampling
from ...draw import draw_from
from ..logits import Head

#: How many bytes of float64 probabilities are held at a time.
DRAW_BYTES = 256 << 20


def draw(
    hidden: Tensor,
    head: Head,
    uniform: Tensor | None,
    sampling: Sampling,
    seen: Tensor | None = None,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A token for each row of ``hidden`` [rows, hidden], by ``uniform`` f64[rows] (None where sampling is greedy).

    ``seen`` bool[rows, vocab] says which tokens a row has, for the repetition penalty; None where there is none. To
    ``kept``, where it is given, is added which tokens could be drawn, bool[rows, vocab], in parts.

    Gives tokens i64[rows], their log-probability under the policy at the temperature (1 for a greedy token), and under
    the distribution that was sampled from: after the repetition penalty and temperature, then top-k, then top-p among
    what top-k left, then min-p among what that left (the order of transformers). For a greedy token, the likeliest
    after the penalty, the latter is 0.
    """
    rows = max(1, DRAW_BYTES // (8 * head.weight.shape[0]))
    if len(hidden) <= rows:
        return draw_from(head.logits(hidden), uniform, sampling, seen, kept)
    parts = [
        draw_from(head.logits(hidden[part]), _rows(uniform, part), sampling, _rows(seen, part), kept)
        for part in (slice(a, a + rows) for a in range(0, len(hidden), rows))
    ]
    tokens, plain, sampled = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(plain), torch.cat(sampled)


def _rows(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]
