"""The model under an engine's adapters, to be read: a reference that needs no weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...workers.base import SharedWeights
from ...workers.records import Build
from ...workers.weights import Shard
from . import adapters
from .engine import HFEngine
from .load import pick_dtypes
from .parameters import Parameters


def base_of(source: HFEngine, build: Build) -> BaseEngine | str:
    """An engine that reads ``source`` with its adapters off, or why there is none that ``build`` could be.

    Its results are bit for bit those of a copy of the weights: dtypes are the same, and the adapters add nothing yet.
    """
    if type(source) is not HFEngine or source.build.lora is None:
        return "its model is split over ranks"
    if pick_dtypes(build, source.device) != (source.net.weights_dtype, source.net.compute):
        return "its weights are of another dtype"
    if not adapters.add_nothing(source.net.model):
        return "its adapters have been trained already"
    return BaseEngine(source)


class BaseEngine(HFEngine):
    """Reads the weights of another engine without its adapters. Nothing is written: ``base_of(engine, build)``."""

    def __init__(self, source: HFEngine) -> None:
        build = replace(source.build, optim=None, lora=None, freeze=())
        super().__init__(build, source._tokenizer, source.net, BaseParameters(source.net.model), source.team)

    def logprobs(self, batch: Batch, *, micro_tokens: int | None = None, entropy: bool = False) -> Any:
        with adapters.off(self.net.model):
            return super().logprobs(batch, micro_tokens=micro_tokens, entropy=entropy)

    def distribution(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        with adapters.off(self.net.model):
            return super().distribution(batch, micro_tokens=micro_tokens)

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        """Hold a state against the weights that are there. SharedWeights where they differ, or are not in it."""
        for shard in self.state_shards()[0]:
            given = replace(shard, tensor=torch.empty_like(shard.tensor))
            if not read(given) or not torch.equal(given.tensor, shard.tensor):
                raise SharedWeights("The state holds other weights than the model that is shared.")


class BaseParameters(Parameters):
    """The weights of a model with adapters, without these, under the names that they have then."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.trained = {}

    def shards(self) -> list[Shard]:
        named = self.model.named_parameters()
        return [self.shard(adapters.base_name(n), p.detach()) for n, p in named if ".lora_" not in n]

    def merged(self) -> list[Shard]:
        return self.shards()

    def whole_state(self) -> dict[str, Tensor] | None:
        return {shard.name: shard.tensor for shard in self.shards()}
