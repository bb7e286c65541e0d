"""Draws the tokens of SGLang's rows as the reference engine does: one uniform per row and token, from the row's seed.

It is one of SGLang's custom logit processors, and runs in the server's scheduler: it looks at the logits of a step,
draws, and leaves the drawn token as the only one that SGLang can take. Both log-probabilities of it leave with the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...workers.model_options import Sampling
from ..draw import draw_from, seen_tokens, uniforms

#: Under which name log-probabilities stand in the ``meta_info`` of an answer: ``[[plain, sampled], ...]`` by token.
LOGPROBS = "flowrl_logprobs"


class Draw:
    """The processor: ``Draw()(logits, [{"seed": 7, "start": 0, "sampling": {...}, "__req__": request}])``.

    SGLang puts the request of each row beside what the row was sent with.
    """

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        """Return logits of which each row has one token left."""
        alike: dict[Sampling, list[int]] = {}
        rows = custom_param_list or []
        for place, row in enumerate(rows):
            alike.setdefault(sampling_of(row["sampling"]), []).append(place)
        for sampling, places in alike.items():
            self._draw(logits, places, [rows[place] for place in places], sampling)
        return logits

    def _draw(self, logits: Tensor, places: list[int], rows: list[dict[str, Any]], sampling: Sampling) -> None:
        at = torch.tensor(places, device=logits.device)
        mine, requests = logits[at].float(), [row["__req__"] for row in rows]
        done = [len(request.output_ids) for request in requests]
        uniform = None
        if not sampling.greedy:
            counters = torch.tensor([row["start"] + tokens for row, tokens in zip(rows, done, strict=True)])
            uniform = uniforms(torch.tensor([row["seed"] for row in rows]), counters).to(logits.device)
        seen = seen_tokens(([*each.origin_input_ids, *each.output_ids] for each in requests), mine, sampling)
        tokens, plain, sampled = draw_from(mine, uniform, sampling, seen)
        for request, number, *pair in zip(requests, done, plain.tolist(), sampled.tolist(), strict=True):
            if request.customized_info is None:
                request.customized_info = {}
            known = request.customized_info.setdefault(LOGPROBS, [])
            del known[number:]  # of a token that SGLang has thrown away: a part of a prompt gives one too
            known.append(pair)
        logits[at] = torch.full_like(mine, -torch.inf).scatter_(-1, tokens[:, None], 0.0).to(logits.dtype)


def sampling_of(said: dict[str, Any]) -> Sampling:
    """Return the settings that came as JSON."""
    return Sampling(**{**said, "stop": tuple(said["stop"])})
