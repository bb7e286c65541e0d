"""The weights of a model that ranks of vLLM split: each has its parts, and one weight at a time is put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...workers.model_options import Build
from ...workers.weights import weight_boxes as boxes
from ...workers.weights.weight_boxes import Shard
from ..hf.engine import split_weights
from ..hf.parameters import Parameters
from ..team import Team


class SplitParameters(Parameters):
    """The boxes of this rank in place of whole weights: ``SplitParameters(build, memory.shards, pool)``."""

    def __init__(self, build: Build, shards: Sequence[Shard], pool: Team) -> None:
        self.build, self.pool, self._shards = build, pool, list(shards)
        self.trained = {}

    def shards(self) -> list[Shard]:
        return self._shards

    def merged(self) -> list[Shard]:
        return self._shards

    def digest(self) -> str:
        return boxes.digest(self.pool.gather(boxes.sums(self._shards)))

    def whole_state(self) -> dict[str, Tensor] | None:
        raise split_weights(self.build)


class WholeOneByOne:
    """A model that computes with weights of which no rank has all: ``WholeOneByOne(model, shards).logprobs(rows)``.

    ``shards`` are the boxes of all ranks, in memory that can be read here. A module has its whole weights while it
    computes, and lets go of them after; the model's own are let go of at once.
    """

    def __init__(self, model: Any, shards: Iterable[Shard]) -> None:
        self.model = model
        self._boxes: dict[str, list[Shard]] = {}
        for shard in shards:
            self._boxes.setdefault(shard.name, []).append(shard)
        names = {id(weight): name for name, weight in model.named_parameters()}
        empty = {n: torch.nn.Parameter(w.data.to("meta"), requires_grad=False) for n, w in model.named_parameters()}
        for module in model.modules():
            mine = {key: names[id(weight)] for key, weight in module.named_parameters(recurse=False)}
            for key, name in mine.items():
                module.register_parameter(key, empty[name])
            if mine:
                module.register_forward_pre_hook(lambda m, _, mine=mine: self._fill(m, mine))
                module.register_forward_hook(lambda m, *_, mine=mine: _put(m, {k: empty[n] for k, n in mine.items()}))

    @torch.no_grad()
    def logprobs(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probability of each token of rows of one length, but the first."""
        ids = torch.tensor(rows)
        found = self.model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        return found.gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()

    def _fill(self, module: Any, names: Mapping[str, str]) -> None:
        _put(module, {k: torch.nn.Parameter(self._whole(name), requires_grad=False) for k, name in names.items()})

    def _whole(self, name: str) -> Tensor:
        parts = self._boxes[name]
        whole = torch.empty(parts[0].shape, dtype=parts[0].tensor.dtype)
        for part in parts:
            whole[tuple(slice(a, b) for a, b in part.box)] = part.tensor
        return whole


def _put(module: Any, weights: Mapping[str, torch.nn.Parameter]) -> None:
    for key, weight in weights.items():
        module.register_parameter(key, weight)
