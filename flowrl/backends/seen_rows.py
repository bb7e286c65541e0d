"""What an update finds of the tokens of rows that are written down: log-probabilities and entropy of its first step.

The passes of the first optimizer step compute them anyway, with the weights that the update starts from. They are kept
of those rows alone, so this costs next to nothing, and brought together when the update is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, CallInfo
from .team import Team

DIGITS = 6  # behind the point, of what is kept


class SeenRows:
    """The recorded ones of this rank's rows: ``SeenRows(batch, recorded=(0, 1))``; each pass adds what it has computed.

    Tokens are numbered through the responses of all rows of the batch.
    """

    def __init__(self, batch: Batch, recorded: Sequence[int]) -> None:
        self.keys, mask = batch.keys, batch.response_mask
        self.lengths, wanted = mask.lengths.tolist(), set(recorded)
        self._row = torch.repeat_interleave(torch.arange(len(batch)), mask.lengths)
        chosen = torch.tensor([key[0] in wanted for key in batch.keys], dtype=torch.bool)
        self._wanted = chosen[self._row] & mask.values.cpu()
        self._parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._open = bool(wanted)

    def add(self, at: Tensor, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Keep what a pass has found of the response tokens ``at``, whose numbers are on the CPU: [n] each."""
        if not self._open:
            return
        here = self._wanted[at].nonzero().squeeze(1)
        if len(here):
            there = here.to(logprobs.device)
            found = logprobs.detach()[there], None if entropy is None else entropy.detach()[there]
            self._parts.append((at[here], *found))

    def close(self) -> None:
        """Keep nothing more: what follows is computed with other weights."""
        self._open = False

    def to_json(self) -> list[dict[str, Any]]:
        """Return what was kept: of each row its key, and numbers by token, None for a token that is not trained."""
        if not self._parts:
            return []
        at = torch.cat([part[0] for part in self._parts])
        columns = {"trained_logprobs": torch.cat([part[1] for part in self._parts]).tolist()}
        entropies = [part[2] for part in self._parts if part[2] is not None]
        if len(entropies) == len(self._parts):
            columns["entropies"] = torch.cat(entropies).tolist()
        first = torch.tensor([0, *self.lengths]).cumsum(0)[self._row[at]]
        found: dict[int, dict[str, Any]] = {}
        for row in self._row[at].unique().tolist():
            found[row] = {"key": list(self.keys[row])} | {name: [None] * self.lengths[row] for name in columns}
        for place, (row, token) in enumerate(zip(self._row[at].tolist(), (at - first).tolist(), strict=True)):
            for name, numbers in columns.items():
                found[row][name][token] = round(numbers[place], DIGITS)
        return list(found.values())


def recorded_of(call: CallInfo | None) -> tuple[int, ...]:
    """The prompts whose rows are written down, of an update's call; the same on every rank."""
    return () if call is None else call.recorded


def of_all_ranks(mine: list[dict[str, Any]], team: Team) -> list[dict[str, Any]]:
    """What all ranks of a team have kept, in the order of the keys."""
    return sorted((said for part in team.gather(mine) for said in part), key=lambda said: said["key"])
