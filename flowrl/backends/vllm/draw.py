"""Draws the tokens of vLLM's rows as the reference engine does: one uniform per row and token, from the row's seed.

It is one of vLLM's logits processors: it looks at the logits of each step, draws, and leaves the drawn token as the
only one that vLLM can take. So a token depends on its row's seed and its place alone, and both of its log-probabilities
are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ...workers.model_options import Sampling
from ..draw import draw_from, kept_ids, seen_tokens, uniforms


class Drawn(NamedTuple):
    """A token's log-probabilities, under the policy and under what was sampled from; where asked for, what could be
    drawn: ``Drawn(-1.5, -0.9, [4, 7])``. No ids are all.
    """

    plain: float
    sampled: float
    support: Sequence[int] = ()


#: By row: what is known of each token, by its place.
DRAWN: dict[str, dict[int, Drawn]] = {}
#: By call: how its rows are sampled.
SAMPLING: dict[int, Sampling] = {}


@dataclass(frozen=True)
class Row:
    """A row that is being sampled: ``Row("3.1.0", 3, seed=7, start=0, prompt=[5, 6], output=[])``.

    ``output`` grows as tokens are drawn; ``start`` is the number of its first token.
    """

    name: str
    call: int
    seed: int
    start: int
    prompt: list[int]
    output: list[int]


def row_of(params: Any, prompt: list[int] | None, output: list[int]) -> Row | None:
    """Return the row behind a request; None for one of which nothing is drawn, such as a probe."""
    said = params.extra_args or {}
    if "row" not in said:
        return None
    return Row(said["row"], said["call"], said["seed"], said["start"], prompt or [], output)


class Draw(LogitsProcessor):
    """The processor: ``Draw(config, torch.device("cpu"), False)`` follows vLLM's batch by its updates."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Row] = {}  # by place in the batch

    def is_argmax_invariant(self) -> bool:
        """Return False: it decides which token is the largest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow which row is at which place."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self.rows.pop(place, None)
        for place, params, prompt, output in batch_update.added:
            self._put(place, row_of(params, prompt, output))
        for here, there, how in batch_update.moved:
            moved, other = self.rows.pop(here, None), self.rows.pop(there, None)
            self._put(there, moved)
            if how == MoveDirectionality.SWAP:
                self._put(here, other)

    def _put(self, place: int, row: Row | None) -> None:
        self.rows.pop(place, None)
        if row is not None:
            self.rows[place] = row

    def apply(self, logits: Tensor) -> Tensor:
        """Draw a token for each row, keep its log-probabilities, and leave it the only one that can be taken."""
        calls: dict[int, list[int]] = {}
        for place, row in self.rows.items():
            calls.setdefault(row.call, []).append(place)
        for call, places in calls.items():
            self._draw(logits, sorted(places), SAMPLING[call])
        return logits

    def _draw(self, logits: Tensor, places: list[int], sampling: Sampling) -> None:
        rows, at = [self.rows[p] for p in places], torch.tensor(places, device=logits.device)
        mine = logits[at]
        uniform = None
        if not sampling.greedy:
            counters = torch.tensor([row.start + len(row.output) for row in rows])
            uniform = uniforms(torch.tensor([row.seed for row in rows]), counters).to(logits.device)
        seen = seen_tokens(([*row.prompt, *row.output] for row in rows), mine, sampling)
        kept: list[Tensor] | None = [] if sampling.support else None
        tokens, plain, sampled = draw_from(mine, uniform, sampling, seen, kept)
        support = [()] * len(rows) if kept is None else kept_ids(kept)
        for row, one, other, ids in zip(rows, plain.tolist(), sampled.tolist(), support, strict=True):
            DRAWN[row.name][len(row.output)] = Drawn(one, other, ids)
        mine.fill_(-torch.inf).scatter_(-1, tokens[:, None], 0.0)
        logits[at] = mine
