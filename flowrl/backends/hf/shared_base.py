"""One model in memory for several engines: each with adapters of its own, or without any for a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...workers.model_options import Build
from ...workers.model_worker import SharedWeights
from ...workers.weights.weight_boxes import Shard
from . import adapters
from .engine import HFEngine
from .load import pick_dtypes
from .net import Net
from .parameters import Parameters, required
from .prepare_model import open_net, prepared


def base_of(source: HFEngine, build: Build) -> BaseEngine | str:
    """An engine that reads ``source`` with its adapters off, or why there is none that ``build`` could be.

    Its results are bit for bit those of a copy of the weights: dtypes are the same, and the adapters add nothing yet.
    """
    why = _apart(source, build)
    if why:
        return why
    if not adapters.add_nothing(source.net.model):
        return "its adapters have been trained already"
    return BaseEngine(source)


def beside(source: HFEngine, build: Build) -> AdapterEngine | str:
    """An engine of ``build`` with adapters of its own over the weights of ``source``, or why there is none.

    Its layers are its own, its weights are those of ``source``, which nobody trains: so neither engine changes a result
    of the other, and each gives bit for bit what it would with a copy.
    """
    why = _apart(source, build)
    if why:
        return why
    model = prepared(adapters.without(source.net.model), build, source._tokenizer)
    net = open_net(model, build, source.device, source.net.compute)
    return AdapterEngine(build, source._tokenizer, net, Parameters(model), source.team)


def _apart(source: HFEngine, build: Build) -> str:
    """Why an engine of ``build`` cannot have the weights under the adapters of ``source``; empty where it can."""
    if type(source.net) is not Net or source.build.lora is None:
        return "its model is split over ranks"
    if pick_dtypes(build, source.device) != (source.net.weights_dtype, source.net.compute):
        return "its weights are of another dtype"
    return ""


class AdapterEngine(HFEngine):
    """Adapters over the weights of another engine, which are never written: ``beside(engine, build)``."""

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        """As ever for what is trained. SharedWeights where a frozen one's state is of other weights under them."""
        if self.trainer is not None:
            super().load_state_shards(read, meta)
            return
        shards = self.state_shards()[0]
        _hold(read, [s for s in shards if ".lora_" not in s.name])
        with torch.no_grad():
            for shard in shards:
                if ".lora_" in shard.name:
                    required(shard, read)


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
        _hold(read, self.state_shards()[0])


def _hold(read: Callable[[Shard], bool], shards: Iterable[Shard]) -> None:
    """Hold a state against weights that are not to be written. SharedWeights where it has others, or none."""
    for shard in shards:
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
