"""What could be drawn at each place, and log-probabilities among it: by transformers and plain loops alone."""

from __future__ import annotations

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def logits_of(actor, batch):
    """The logits before each response token, row by row, by transformers alone: [tokens, vocab] in float64."""
    net, found = actor.engine.net.model, []
    for tokens, response in zip(batch.tokens.to_list(), batch.response_ids.to_list(), strict=True):
        with torch.no_grad():
            every = net(torch.tensor([tokens])).logits[0].double()
        found.append(every[len(tokens) - len(response) - 1 : -1])
    return torch.cat(found)


def processed(logits, how):
    """What transformers samples from."""
    if how.get("greedy"):
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf)
    scores = TemperatureLogitsWarper(float(how.get("temperature", 1.0)))(None, logits)
    for name, off, make in (("top_k", 0, TopKLogitsWarper), ("top_p", 1.0, TopPLogitsWarper)):
        scores = make(how[name])(None, scores) if how.get(name, off) != off else scores
    return MinPLogitsWarper(how["min_p"])(None, scores) if how.get("min_p") else scores


def at_targets(logits, batch):
    return logits.log_softmax(-1).gather(-1, batch.response_ids.values.long()[:, None]).squeeze(-1)


def recorded(batch, vocab):
    """The support as a mask, from the two columns by plain loops."""
    ids, found = batch.support_ids.values.tolist(), []
    for size in batch.support_sizes.values.tolist():
        mine, ids = ids[:size], ids[size:]
        found.append([not size or v in mine for v in range(vocab)])
    assert not ids
    return torch.tensor(found)
