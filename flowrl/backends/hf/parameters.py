"""The weights of a model as this process holds them: those that are trained with their gradients, and all as boxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from ...workers.weights import weight_boxes as boxes
from ...workers.weights.weight_boxes import Shard
from ..team import Team
from . import adapters


class Parameters:
    """A model that is whole in one process: ``Parameters(model).trained["model.norm.weight"]``.

    ``trained`` are the leaves that the optimizer moves, by name; ``pool`` all ranks that hold parts of the model.
    """

    since = "since the model was opened"  # the longest that they can have been what they are

    def __init__(self, model: Any, *, main: bool = True) -> None:
        self.model, self.main, self.pool = model, main, Team()
        self.trained: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}

    # -- the gradient of a step ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make ``grad`` of every trained weight that of all passes on all ranks; 0 where no row reached it."""
        for weight in self.trained.values():
            if weight.grad is None:  # its momentum goes on
                weight.grad = torch.zeros_like(weight)

    def clip(self, limit: float | None) -> Tensor:
        """The norm of the whole gradient before clipping; gradients are scaled where it is above the limit."""
        return torch.nn.utils.clip_grad_norm_(list(self.trained.values()), math.inf if limit is None else limit)

    def clear(self) -> None:
        """Forget the gradients."""
        for weight in self.trained.values():
            weight.grad = None

    # -- all weights as boxes -----------------------------------------------------------------------------------------

    def shard(self, name: str, tensor: Tensor, *, prefix: str = "") -> Shard:
        """The box of something that is laid out as the weight ``name`` is."""
        return Shard(prefix + name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, self.main)

    def shards(self) -> list[Shard]:
        """Views on all weights, tied ones once, with adapters as weights of their own."""
        return [self.shard(n, p.detach()) for n, p in self.model.named_parameters()]

    def merged(self) -> list[Shard]:
        """All weights as a model without adapters has them: what it has are added; they may be views."""
        return [self.shard(n, w) for n, w in adapters.merged(self.model).items()]

    def written(self) -> None:
        """Note that somebody wrote into the views of :meth:`shards`."""

    def digest(self) -> str:
        """The digest of :meth:`shards`, which does not depend on the layout. Every rank of the pool has to call it."""
        mine = [Shard(s.name, s.shape, s.offset, s.tensor, True) for s in self.shards()]
        return boxes.digest([boxes.sums(mine)])

    def whole_trained(self) -> dict[str, Tensor] | None:
        """The trained weights by name, whole, on the first rank of the pool."""
        return {name: weight.detach() for name, weight in self.trained.items()}

    def whole_state(self) -> dict[str, Tensor] | None:
        """What to save, adapters merged, on the first rank of the pool; None: the model's own state will do."""
        return adapters.whole_state(self.model)


def required(shard: Shard, read: Callable[[Shard], bool]) -> None:
    """Read a weight. ModelError where there is none to read."""
    if not read(shard):
        name = shard.name.removeprefix("weights.")
        raise ModelError(
            f"The state to load has no weight '{name}'.", fix="Load it into the model that it was saved of."
        )
