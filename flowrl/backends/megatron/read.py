"""Log-probabilities, values and scores of rows through a pipeline; every stage gets what the last one finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import ProgramError
from ..hf.micro_batches import Micro, Rows, micro_batches
from ..hf.ragged import padded
from ..hf.read import Reader
from ..hf.update_passes import parts_of
from ..team import Team
from .net import StageNet

Pass = tuple[Tensor, Callable[[], Any]]


class StageReader(Reader):
    """Reads this rank's rows, a micro-batch behind the other: ``StageReader(net, team, tokens=4096).scores(batch)``."""

    def __init__(self, net: StageNet, team: Team, tokens: int) -> None:
        super().__init__(net, team, tokens)
        self.stage = net

    def scores(self, batch: Batch, micro_tokens: int | None = None) -> Column:
        tokens, net = batch.tokens, self.stage
        lengths, starts, ids = tokens.lengths, tokens.offsets[:-1], tokens.values.long().cpu()
        if len(lengths) and int(lengths.min()) < 1:
            raise ProgramError("A row without tokens has no score.", fix="Filter empty rows first.")
        found, every = torch.zeros(len(lengths), dtype=torch.float32), torch.arange(len(lengths))
        parts = parts_of(every, lengths, every, micro_tokens or self.tokens, together=False)

        def compute(part: Tensor) -> Tensor:
            return net.values(net.hidden()[torch.arange(len(part)), (lengths[part] - 1).to(net.device)])

        fed = [padded(ids, starts[p], lengths[p], int(lengths[p].max()), net.filler) for p in parts]
        passes = [(i, partial(compute, p)) for i, p in zip(fed, parts, strict=True)]
        for part, values in zip(parts, self._through(passes, partial(compute, every[:0])), strict=False):
            found[part] = values.float().cpu()
        return Column(found)

    def _each(
        self, rows: Rows, micro_tokens: int | None, compute: Callable[[Micro], Any]
    ) -> Iterator[tuple[Micro, Any]]:
        micros = micro_batches(self.net, rows, torch.arange(len(rows)), micro_tokens or self.tokens)
        there = [m.to(self.net.device) for m in micros]
        passes = [(m.ids, partial(compute, m)) for m in there]
        idle = Micro.idle(self.net).to(self.net.device)
        yield from zip(there, self._through(passes, partial(compute, idle)), strict=False)

    def _through(self, passes: list[Pass], idle: Callable[[], Any]) -> list[Any]:
        """What is found in each pass, on every stage; at the end also in those that only keep others company."""
        count = self.stage.passes(len(passes), self.team.most) - len(passes)
        return self.stage.shown(self.stage.through([*passes, *[(Micro.idle(self.net).ids, idle)] * count]))
