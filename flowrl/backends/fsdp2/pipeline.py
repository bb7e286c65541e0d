"""Updates and reading ops through a pipeline: the last stage computes, and all stages learn what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import ProgramError
from ..gap import add_sums
from ..hf.micro_batches import Micro, Rows, micro_batches
from ..hf.ragged import padded
from ..hf.read import Reader
from ..hf.train import Passed, Report, Trainer, _forward
from ..hf.update_passes import Data, parts_of
from .stage import Pass, StageNet


class StageTrainer(Trainer):
    """Steps of a stage: ``StageTrainer(net, parameters, optim, team)``.

    Ranks of the team have rows of their own, those of a pipeline the same ones. All passes of a step go through the
    stages in one schedule.
    """

    net: StageNet

    def _passes(self, parts: Sequence[tuple[Data, Tensor, float]], micro_tokens: int) -> list[Report]:
        passes: list[Pass] = []
        owner: list[int] = []
        for number, (data, chosen, factor) in enumerate(parts):
            weights = data.weights(chosen) * factor
            for item in data.passes(chosen, micro_tokens):
                micro = item if isinstance(item, Micro) else plain(data.padded(item))
                passes.append((micro, partial(_forward, data, item, weights)))
                owner.append(number)
        idle = (Micro.idle(self.net), partial(_forward, parts[0][0], None, torch.zeros(0)))
        passes += [idle] * (max(1, self.team.most(len(passes))) - len(passes))
        try:
            kept = self.net.through(passes, train=True)
        except BaseException:
            self.net.reset()
            self.parameters.clear()
            raise
        told = self.net.pipe.told(_summed(kept, owner, len(parts)))
        return [self._report(part, *said) for part, said in zip(parts, told, strict=True)]

    def told(self, item: Any) -> Any:
        return self.net.pipe.told(item)

    def _report(
        self, part: tuple[Data, Tensor, float], loss: float, sums: dict[str, float], by_row: list[str]
    ) -> Report:
        data, chosen, _ = part
        total = self.team.sum(torch.tensor(loss, dtype=torch.float64, device=self.net.device))
        held = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
        trained = data.table.trained(chosen)
        return Report(total, held, frozenset(by_row), int(data.table.counts[trained].sum()), len(trained))


def _summed(
    kept: Sequence[Passed], owner: Sequence[int], parts: int
) -> list[tuple[float, dict[str, float], list[str]]]:
    """Of each part the sum of its losses, the sums of what they report, and which of that is per row."""
    found = []
    for number in range(parts):
        mine = [k for k, who in zip(kept, owner, strict=False) if who == number]  # idle passes have no owner
        sums: dict[str, float] = {}
        for _, told, _ in mine:
            add_sums(sums, {name: float(value) for name, value in told.items()})
        loss = sum(float(value.double()) for value, *_ in mine)
        found.append((loss, sums, sorted({name for *_, by_row in mine for name in by_row})))
    return found


class StageReader(Reader):
    """Reads this rank's rows through a pipeline; every stage has what is found: ``StageReader(net, team, 4096)``."""

    net: StageNet

    def scores(self, batch: Batch, micro_tokens: int | None = None) -> Column:
        net, lengths = self.net, batch.tokens.lengths
        if len(lengths) and int(lengths.min()) < 1:
            raise ProgramError("A row without tokens has no score.", fix="Filter empty rows first.")
        found, every = torch.zeros(len(lengths), dtype=torch.float32), torch.arange(len(lengths))
        parts = parts_of(every, lengths, every, micro_tokens or self.tokens, together=False)
        passes: list[Pass] = []
        for part in parts:
            starts, longest = batch.tokens.offsets[:-1][part], int(lengths[part].max())
            ids = padded(batch.tokens.values.long(), starts, lengths[part], longest, net.filler)
            passes.append((plain(ids), partial(self._last, batch.tokens, part)))
        with net.reading():
            read = self._through(passes, partial(self._last, batch.tokens, every[:0]))
        for part, scores in zip(parts, read, strict=False):
            found[part] = scores.float().cpu()
        return Column(found)

    def _each(
        self, rows: Rows, micro_tokens: int | None, compute: Callable[[Micro], Any]
    ) -> Iterator[tuple[Micro, Any]]:
        micros = micro_batches(self.net, rows, torch.arange(len(rows)), micro_tokens or self.tokens)
        there = [micro.to(self.net.device) for micro in micros]
        idle = partial(compute, Micro.idle(self.net).to(self.net.device))
        found = self._through([(micro, partial(compute, micro)) for micro in there], idle)
        yield from zip(there, found, strict=False)

    def _through(self, passes: list[Pass], idle: Callable[[], Any]) -> list[Any]:
        """What is found in each pass, and in those at the end that only keep other ranks company."""
        count = max(1, self.team.most(len(passes))) - len(passes)
        net = self.net
        return net.pipe.shown(net.through([*passes, *[(Micro.idle(net), idle)] * count], train=False), net.device)


def plain(ids: Tensor) -> Micro:
    """A pass over padded sequences that is nothing but its ids."""
    none = torch.zeros(0, dtype=torch.int64)
    return Micro(ids, None, None, none, none)
