"""Drawing tokens: one uniform per row and token from a counter, then the inverse of the distribution's sum."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..splitmix import GOLDEN, mix
from ..workers.model_options import Sampling


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), f64, each a function of its own seed and counter alone; the two are i64 and broadcast."""
    bits = mix(mix(seeds) + (counters + 1) * GOLDEN)
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def draw_from(
    logits: Tensor,
    uniform: Tensor | None,
    sampling: Sampling,
    seen: Tensor | None,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`flowrl.backends.hf.generation.sample.draw` from logits [rows, vocab]."""
    temperature = sampling.row_temperature
    logprobs = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    if seen is not None:
        logits = penalised(logits, seen, sampling.repetition_penalty)
    if sampling.greedy or uniform is None:
        tokens = logits.argmax(-1)
        plain = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
        if kept is not None:
            kept.append(torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, tokens[:, None], True))
        return tokens, plain, torch.zeros_like(plain)
    shaped = logprobs
    if seen is not None:
        shaped = torch.log_softmax(logits / temperature, -1)
    shaped = truncated(shaped, sampling)
    if kept is not None:
        kept.append(shaped > -torch.inf)
    sums = shaped.double().exp_().cumsum_(-1) if shaped.dtype != torch.float64 else shaped.exp().cumsum_(-1)
    last = sums[:, -1]
    # Strictly below the whole sum, so that the token found is one with a probability above 0.
    goal = torch.minimum(uniform * last, torch.nextafter(last, torch.zeros_like(last)))
    tokens = torch.searchsorted(sums, goal[:, None], right=True).clamp_(max=sums.shape[-1] - 1)  # also of what is nan
    plain = logprobs.gather(-1, tokens).squeeze(-1)
    sampled = plain if shaped is logprobs else shaped.gather(-1, tokens).squeeze(-1)
    return tokens.squeeze(-1), plain, sampled


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [rows, vocab] with those of ``seen`` tokens divided by the penalty, or multiplied where they are below 0.

    >>> penalised(torch.tensor([[4.0, -1.0, 4.0]]), torch.tensor([[True, True, False]]), 2.0)
    tensor([[ 2., -2.,  4.]])
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def truncated(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [rows, vocab] after top-k, top-p and min-p; the tensor itself where there are none of these."""
    if 0 < sampling.top_k < logprobs.shape[-1] or sampling.top_p < 1:
        logprobs = _truncated(logprobs, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:
        least = logprobs.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < least, -torch.inf), -1)
    return logprobs


def _truncated(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Log-probabilities after top-k and top-p. Tokens as likely as the last one kept are kept too."""
    ordered = None
    if 0 < top_k < logprobs.shape[-1]:
        ordered = logprobs.topk(top_k, -1).values
        logprobs = logprobs.masked_fill(logprobs < ordered[:, -1:], -torch.inf)
        whole = logprobs.logsumexp(-1, keepdim=True)
        logprobs, ordered = logprobs - whole, ordered - whole
    if top_p < 1:
        ordered = _most_likely(logprobs, top_p) if ordered is None else ordered
        shares = ordered.double().exp()  # not in place: of float64, .double() is the tensor itself
        least = ordered.masked_fill(shares.cumsum(-1) - shares >= top_p, torch.inf).amin(-1, keepdim=True)
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < least, -torch.inf), -1)
    return logprobs


def _most_likely(logprobs: Tensor, top_p: float, first: int = 1024) -> Tensor:
    """Log-probabilities in falling order: all of them, or on a CPU only so many as hold ``top_p`` of every row."""
    if logprobs.device.type == "cpu" and first < logprobs.shape[-1]:  # sorting a whole vocabulary is slow there
        ordered = logprobs.topk(first, -1).values
        if bool((ordered.double().exp().sum(-1) >= top_p).all()):
            return ordered
    return logprobs.sort(-1, descending=True).values


def kept_ids(kept: Iterable[Tensor]) -> list[array[int]]:
    """Return the ids of each row of masks bool[rows, vocab], in parts; none where all of them could be drawn.

    >>> kept_ids([torch.tensor([[True, False, True], [True, True, True]])])
    [array('i', [0, 2]), array('i')]
    """
    found: list[array[int]] = []
    for inside in kept:
        inside = inside & ~inside.all(-1)[:, None]
        ids = array("i", inside.nonzero()[:, 1].tolist())
        ends = inside.sum(-1).cumsum(0).tolist()
        found += [ids[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    return found


def seen_tokens(rows: Iterable[Sequence[int]], logits: Tensor, sampling: Sampling) -> Tensor | None:
    """Return which tokens each row has, bool[rows, vocab]; None where nothing is penalised."""
    if sampling.repetition_penalty == 1.0:
        return None
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for mine, row in zip(seen, rows, strict=True):
        ids = torch.tensor(row, device=logits.device)
        mine[ids[ids < logits.shape[-1]]] = True
    return seen
