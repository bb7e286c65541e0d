"""Log-probabilities of frozen rows: as the trainer computes them, and as an engine that does one thing otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...frozen_rows import FrozenRows
from ..generation.decode import Slotted
from ..logits import Head
from ..net import Net

#: Of the logits of a token, [tokens, vocab], the ids and the temperatures [tokens]: its log-probability, [tokens].
Finish = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS, TOKENS = 8, 256  # of one forward pass, and of one product with the head


def plain(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """The log-probability of the policy at the temperature, over the whole vocabulary."""
    return torch.log_softmax(logits / temperature[:, None], -1).gather(-1, targets[:, None]).squeeze(-1)


class Scores:
    """Computes for the rows: ``Scores(net, rows).finished(scores.hidden())`` are those of the trainer."""

    def __init__(self, net: Net, rows: FrozenRows) -> None:
        self.net, self.rows = net, rows
        counts = torch.tensor([len(r) for r in rows.responses])
        self.row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        self.temperature = rows.temperature.to(net.head.wide)[self.row].to(net.device)
        self.targets = torch.tensor([t for r in rows.responses for t in r], device=net.device)

    def now(self) -> Tensor:
        """What the trainer computes with the weights as they are, f64[total]."""
        return self.finished(self.hidden())

    def hidden(
        self,
        prompts: Sequence[Sequence[int]] | None = None,
        positions: Callable[[int, int], Sequence[int]] | None = None,
    ) -> Tensor:
        """Hidden states [total, hidden] before each token after the prompts.

        ``prompts`` take the place of the rows' own; ``positions(prompt, response)`` gives those of a row's tokens.
        """
        prompts = self.rows.prompts if prompts is None else prompts
        found: list[Tensor] = []
        with torch.no_grad(), self.net.mixed():
            for a in range(0, len(prompts), ROWS):
                part = list(zip(prompts[a : a + ROWS], self.rows.responses[a : a + ROWS], strict=True))
                width = max(len(p) + len(r) for p, r in part)
                filler = self.net.filler
                ids = torch.tensor([[*p, *r, *[filler] * (width - len(p) - len(r))] for p, r in part])
                where = mask = None
                if positions is not None:
                    said = [list(positions(len(p), len(r))) for p, r in part]
                    where = torch.tensor([[*s, *[0] * (width - len(s))] for s in said]).to(self.net.device)
                    mask = self._causal(len(part), width)  # without it transformers takes a jump for another sequence
                states = self.net.hidden(ids.to(self.net.device), where, mask)
                found += [s[len(p) - 1 : len(p) + len(r) - 1] for s, (p, r) in zip(states, part, strict=True)]
        return torch.cat(found)

    def finished(
        self, hidden: Tensor, *, finish: Finish = plain, head: Head | None = None, temperature: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities f64[total] on the CPU from hidden states."""
        head, heat = head or self.net.head, self.temperature if temperature is None else temperature
        found: list[Tensor] = []
        with torch.no_grad():
            for a in range(0, len(hidden), TOKENS):
                part = slice(a, a + TOKENS)
                found.append(finish(head.logits(hidden[part]), self.targets[part], heat[part]).double().cpu())
        return torch.cat(found)

    def _causal(self, rows: int, width: int) -> Tensor:
        dtype = self.net.compute
        later = torch.ones(width, width, dtype=torch.bool).triu(1)
        mask = torch.zeros(width, width, dtype=dtype).masked_fill_(later, torch.finfo(dtype).min)
        return mask.to(self.net.device).expand(rows, 1, -1, -1)

    def replayed(self, *, alone: bool = False) -> Tensor:
        """As an engine computes while it generates: a prompt at once, then token by token, with keys and values kept.

        ``alone``: each row by itself.
        """
        groups = [[i] for i in range(len(self.rows.prompts))] if alone else [list(range(len(self.rows.prompts)))]
        found: dict[int, Tensor] = {}
        with torch.no_grad(), self.net.mixed():
            for group in groups:
                found |= self._decoded(group)
        with self.net.exact():
            return self.finished(torch.cat([found[i] for i in range(len(found))]))

    def _decoded(self, group: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states of each row of a group that is decoded together."""
        net, rows = self.net, self.rows
        order = sorted(group, key=lambda i: (len(rows.prompts[i]), tuple(rows.prompts[i])), reverse=True)
        distinct = list(dict.fromkeys(tuple(rows.prompts[i]) for i in order))
        lengths = torch.tensor([len(p) for p in distinct])
        source = torch.tensor([distinct.index(tuple(rows.prompts[i])) for i in order])
        longest = max(len(rows.responses[i]) for i in order)
        ids = torch.tensor([t for p in distinct for t in p], device=net.device)
        decoder = Slotted(net, ids, lengths.cumsum(0) - lengths, lengths, source, longest)
        states = [decoder.first()]
        for t in range(longest - 1):
            given = [rows.responses[i][t] if t < len(rows.responses[i]) else net.filler for i in order]
            states.append(decoder.next(torch.tensor(given, device=net.device), t))
        stacked = torch.stack(states, 1)
        return {i: stacked[at, : len(rows.responses[i])] for at, i in enumerate(order)}

    def with_prompt_of(self, switch: AbstractContextManager[None], *, whole: bool = False) -> Tensor:
        """With keys and values of the prompts from the net inside ``switch``, and the rest as it is.

        The last token of a prompt is computed as it is, unless the ``whole`` prompt is from there.
        """
        from transformers.cache_utils import DynamicCache

        net, found = self.net, list[Tensor]()
        caches: list[DynamicCache] = []
        with torch.no_grad(), net.mixed():
            with switch:
                for prompt in self.rows.prompts:
                    caches.append(DynamicCache(config=net.config))
                    known = list(prompt if whole else prompt[:-1])
                    states = (
                        net.hidden(torch.tensor([known], device=net.device), cache=caches[-1])[0] if known else None
                    )
                    found.append(states[-1:] if whole and states is not None else torch.zeros(0, device=net.device))
            for i, (prompt, response) in enumerate(zip(self.rows.prompts, self.rows.responses, strict=True)):
                given = list(response[:-1]) if whole else [prompt[-1], *response[:-1]]
                first = len(prompt) - (not whole)
                positions = torch.arange(first, first + len(given), device=net.device)[None]
                if given:
                    rest = net.hidden(torch.tensor([given], device=net.device), positions, cache=caches[i])[0]
                    found[i] = torch.cat([found[i], rest]) if len(found[i]) else rest
        return self.finished(torch.cat(found))
