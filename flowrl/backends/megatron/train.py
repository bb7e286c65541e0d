"""An update on a mesh: forward and backward passes through the pipeline, then one step of megatron-core's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...workers.model_options import Optim
from ...workers.weights.weight_boxes import Shard
from ..gap import add_sums
from ..hf.micro_batches import Micro
from ..hf.ragged import padded
from ..hf.train import Report, Trainer, _forward, learning_rate
from ..hf.update_passes import Data
from ..team import Team
from .net import StageNet
from .optimizer import Optimizer
from .parameters import StageParameters

Part = tuple[Data, Tensor, float]


class StageTrainer(Trainer):
    """Steps of a stage: ``StageTrainer(net, parameters, optimizer, optim, team)``; ``steps`` counts them.

    Ranks of the team have rows of their own, those of a pipeline or of ``tp`` the same ones. A step is that of one
    process with all rows.
    """

    def __init__(
        self, net: StageNet, parameters: StageParameters, optimizer: Optimizer, optim: Optim, team: Team
    ) -> None:
        self.net: StageNet = net  # type: ignore[misc]
        self.parameters: StageParameters = parameters  # type: ignore[misc]
        self.optimizer, self.optim, self.team, self.steps = optimizer, optim, team, 0
        self._batch = None

    def step(self, parts: Sequence[Part], micro_tokens: int, lr: float | None = None) -> Report:
        lr = learning_rate(self.optim, self.steps) if lr is None else lr
        report, *others = self.push(parts, micro_tokens)
        for other in others:
            report = replace(report, loss=report.loss + other.loss, pretraining=other.loss)
        with self.net.parallel.active():
            norm = self.optimizer.norm()
            if not isfinite(norm + float(report.loss)):
                self.optimizer.zero()
                raise self.not_finite(float(report.loss), norm)
            self.optimizer.step(norm, lr)
            self.optimizer.zero()
        self.stepped()
        return replace(report, norm=norm, lr=lr)

    def gradient(self, data: Data, chosen: Tensor, micro_tokens: int, factor: float = 1.0) -> Report:
        return self.push([(data, chosen, factor)], micro_tokens)[0]

    def push(self, parts: Sequence[Part], micro_tokens: int) -> list[Report]:
        """Add up the gradient of the losses of all parts; each one's report."""
        passes: list[tuple[Tensor, Callable[[], Any]]] = []
        owner: list[int] = []
        for number, (data, chosen, factor) in enumerate(parts):
            weights = data.weights(chosen) * factor
            for item in data.passes(chosen, micro_tokens):
                passes.append((_ids(data, item), partial(_forward, data, item, weights)))
                owner.append(number)
        data = parts[0][0]
        idle = (Micro.idle(self.net).ids, partial(_forward, data, None, torch.zeros(0)))
        passes += [idle] * (self.net.passes(len(passes), self.team.most) - len(passes))
        with self.net.parallel.active():
            self.optimizer.zero()
        kept = self.net.through(passes, module=self.optimizer.module)
        told = self.net.told(_said(kept, owner, len(parts)))
        return [self._report(part, *said) for part, said in zip(parts, told, strict=True)]

    def fall_asleep(self) -> int:
        return self.optimizer.empty()

    def awake(self) -> int:
        return self.optimizer.refill()

    def told(self, item: Any) -> Any:
        return self.net.told(item)

    def _report(self, part: Part, loss: float, sums: Mapping[str, float], by_row: list[str]) -> Report:
        data, chosen, _ = part
        table, trained = data.table, data.table.trained(chosen)
        total = self.team.sum(torch.tensor(loss, dtype=torch.float64))
        held = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
        return Report(total, held, frozenset(by_row), int(table.counts[trained].sum()), len(trained))

    # -- state ------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        self.steps = 0
        self.optimizer.restart()

    def state_shards(self) -> tuple[list[Shard], dict[str, Any]]:
        return self.parameters.state_shards(), {"steps": self.steps}

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        self.steps = int(meta["steps"])
        self.parameters.since = "since the checkpoint that they were read from"
        with torch.no_grad():
            self.parameters.load_state_shards(read, self.steps)


def _ids(data: Data, item: Micro | Tensor) -> Tensor:
    """What a pass is fed: [sequences, tokens]."""
    if isinstance(item, Micro):
        return item.ids
    lengths = data.tokens.lengths[item]
    starts = data.tokens.offsets[:-1][item]
    return padded(data.tokens.values.long(), starts, lengths, int(lengths.max()), data.net.filler)


def _said(kept: list[Any], owner: list[int], parts: int) -> list[tuple[float, dict[str, float], list[str]]]:
    """Of each part the sum of its losses, the sums of what they report, and which of that is per row."""
    found: list[tuple[float, dict[str, float], list[str]]] = []
    for number in range(parts):
        mine = [k for k, who in zip(kept, owner, strict=False) if who == number]
        sums: dict[str, float] = {}
        for _, told, _ in mine:
            add_sums(sums, {name: float(value) for name, value in told.items()})
        loss = sum(float(value.double()) for value, _, _ in mine)
        found.append((loss, sums, sorted({name for *_, by_row in mine for name in by_row})))
    return found
