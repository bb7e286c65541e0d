"""Log-probabilities, values and scores of rows: passes without gradient, as many on every rank as on any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import ProgramError
from ..team import Team
from .logits import distributions, token_logprobs
from .micro_batches import Micro, Rows, micro_batches
from .net import Net
from .ragged import padded
from .update_passes import parts_of


class Reader:
    """Reads this rank's rows with a net: ``Reader(net, Team(), tokens=4096).logprobs(batch)``.

    ``tokens`` are those of a forward pass where a call does not say. Results are on the CPU, in the order of rows.
    """

    def __init__(self, net: Net, team: Team, tokens: int) -> None:
        self.net, self.team, self.tokens = net, team, tokens

    def logprobs(self, batch: Batch, micro_tokens: int | None = None, *, entropy: bool = False) -> Any:
        """As :meth:`flowrl.backends.hf.engine.HFEngine.logprobs`."""
        net, rows = self.net, Rows.of(batch)
        targets, temperature = rows.targets.to(net.device), rows.temperature_at(net.device)
        support = rows.support_at(net.device)
        found = torch.zeros(len(targets), dtype=torch.float32, device=net.device)
        spread = torch.zeros_like(found)

        def compute(micro: Micro) -> tuple[Tensor, Tensor | None]:
            at, hidden = micro.at, micro.hidden(net)
            return token_logprobs(
                hidden, net.head, targets[at], temperature=temperature(at), support=support(at), entropy=entropy
            )

        with net.reading():
            for micro, (part, uncertain) in self._each(rows, micro_tokens, compute):
                found[micro.at] = part.float()
                if uncertain is not None:
                    spread[micro.at] = uncertain.float()
        column = batch.response_mask.with_values(found.cpu())
        return (column, column.with_values(spread.cpu())) if entropy else column

    def distribution(self, batch: Batch, micro_tokens: int | None = None) -> Column:
        """As :meth:`flowrl.backends.hf.engine.HFEngine.distribution`."""
        net, rows = self.net, Rows.of(batch)
        vocab = net.model.get_input_embeddings().weight.shape[0]
        found, temperature = torch.zeros(int(rows.responses.sum()), vocab), rows.temperature_at(net.device)

        def compute(micro: Micro) -> Tensor:
            return distributions(micro.hidden(net), net.head, temperature(micro.at))

        with net.reading():
            for micro, part in self._each(rows, micro_tokens, compute):
                found[micro.at.cpu()] = part.float().cpu()
        return batch.response_mask.with_values(found)

    def values(self, batch: Batch, micro_tokens: int | None = None) -> Column:
        """As :meth:`flowrl.backends.hf.engine.HFEngine.values`."""
        net, rows = self.net, Rows.of(batch)
        found = torch.zeros(int(rows.responses.sum()), dtype=torch.float32, device=net.device)
        with net.reading():
            for micro, part in self._each(rows, micro_tokens, lambda m: net.values(m.hidden(net))):
                found[micro.at] = part.float()
        return batch.response_mask.with_values(found.cpu())

    def scores(self, batch: Batch, micro_tokens: int | None = None) -> Column:
        """As :meth:`flowrl.backends.hf.engine.HFEngine.scores`."""
        lengths = batch.tokens.lengths
        if len(lengths) and int(lengths.min()) < 1:
            raise ProgramError("A row without tokens has no score.", fix="Filter empty rows first.")
        found, every = torch.zeros(len(lengths), dtype=torch.float32), torch.arange(len(lengths))
        parts = parts_of(every, lengths, every, micro_tokens or self.tokens, together=False)
        idle = self.team.most(len(parts)) - len(parts)
        with self.net.reading():
            for part in [*parts, *[torch.arange(0)] * idle]:
                found[part] = self.net.run(partial(self._last, batch.tokens, part)).float().cpu()
        return Column(found)

    def _last(self, tokens: Column, rows: Tensor) -> Tensor:
        """The scalar head's number at the last token of these rows; where there is none, a pass all the same."""
        net, lengths = self.net, tokens.lengths[rows]
        ids = torch.full((1, 1), net.filler)
        if len(rows):
            ids = padded(tokens.values.long(), tokens.offsets[:-1][rows], lengths, int(lengths.max()), net.filler)
        with net.mixed():
            hidden = net.hidden(ids.to(net.device))
        return net.values(hidden[torch.arange(len(rows), device=net.device), (lengths - 1).to(net.device)])

    def _each(
        self, rows: Rows, micro_tokens: int | None, compute: Callable[[Micro], Any]
    ) -> Iterator[tuple[Micro, Any]]:
        """Micro-batches of all rows on the device, and what ``compute`` gives for each; idle ones at the end."""
        micros = micro_batches(self.net, rows, torch.arange(len(rows)), micro_tokens or self.tokens)
        idle = self.team.most(len(micros)) - len(micros)
        for micro in [*micros, *[Micro.idle(self.net)] * idle]:
            there = micro.to(self.net.device)
            yield there, self.net.run(partial(compute, there))
