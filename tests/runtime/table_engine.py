"""A fake engine that trains: its table is its weights, an update moves it a little, and rows have log-normal lengths.

All that flowrl has to be told of it is ROW.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import flowrl as fl
from flowrl.backends import open_tokenizer
from flowrl.placement.backends import ORDERS, PUBLISH, Backend
from flowrl.workers.model_options import Build
from flowrl.workers.weights.weight_boxes import Shard, digest, sums

ROW = Backend(
    "table",
    "a table that is trained",
    module=__name__,
    trains=True,
    generates=True,
    publishes=PUBLISH,
    orders=ORDERS,
    logprobs=("raw", "processed"),
)


def lognormal(seed: int) -> int:
    """Tokens of the row with a seed: 5 in the middle, a long tail."""
    return int(random.Random(seed).lognormvariate(1.6, 1.0)) + 1


class Table(fl.testing.FakeEngine):
    """``open_engine(Build(model))``: of the model it needs the tokenizer alone."""

    def __init__(self, build: Build) -> None:
        super().__init__(vocab=32, tokenizer=open_tokenizer(build.model), lengths=lognormal)

    # -- weights ------------------------------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        return [Shard("table", tuple(self.table.shape), (0, 0), self.table, True)]

    def plain_weights(self) -> Mapping[str, Tensor]:
        return {"table": self.table}

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.table.copy_(weights["table"])

    def weights_written(self) -> None:
        """Nothing is made of them."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"table": self.table}, {}

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.table.copy_(tensors["table"])

    def state_shards(self) -> tuple[list[Shard], dict[str, Any]]:
        return self.shards(), {}

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        for shard in self.shards():
            read(shard)

    def digest(self) -> str:
        return digest([sums(self.shards())])

    def save(self, folder: str) -> None:
        """There is no model."""

    # -- training -----------------------------------------------------------------------------------------------------

    def update(self, batch: fl.Batch, loss: Any, **how: Any) -> Mapping[str, float]:
        """Make the tokens of these rows a little likelier than others."""
        ids = batch["tokens"].values.long()
        self.table.index_add_(1, ids, torch.full((len(self.table), len(ids)), 1e-3, dtype=self.table.dtype))
        return {"loss": float(self.table.mean())}

    def restart_optimizer(self) -> None:
        """There is none."""

    def logprobs(self, *args: Any, **how: Any) -> Any:
        raise NotImplementedError

    distribution = values = scores = copy_weights_from = blend = base_alone = other_adapters = logprobs


def open_engine(build: Build) -> Table:
    """Return an engine of a table."""
    return Table(build)
