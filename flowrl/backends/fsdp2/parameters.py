"""The part of every weight that a rank has: its box, its gradient, and what it takes to make a whole of parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from ...placement.model.weight_layout import chunk
from ...workers.weights import weight_boxes as boxes
from ...workers.weights.weight_boxes import Shard
from ..hf.adapters import base_name
from ..hf.parameters import Parameters
from ..team import Team
from .net import ShardedNet
from .split import partial


class ShardedParameters(Parameters):
    """Parts of weights on the mesh ``dp, fsdp, tp``: tensor parallel first, then ``fsdp`` cuts dim 0 of what it leaves.

    ``trained`` are leaves of their own that share memory with the model's weights, so that AdamW knows nothing of
    meshes. ``dims`` are the dims that tensor parallel splits. Where there are stages a rank has the weights of its own;
    ``twin`` is the name of one that the first and the last stage both have, and the group of those two.
    """

    def __init__(
        self, net: ShardedNet, mesh: Any, dims: dict[str, int], pool: Team, *, twin: tuple[str, Any] | None = None
    ) -> None:
        self.net, self.model, self.pool, self.dims = net, net.model, pool, dims
        self.sizes = [mesh[a].size() for a in ("dp", "fsdp", "tp")]
        self.at = [mesh[a].get_local_rank() for a in ("dp", "fsdp", "tp")]
        self.twin, self.ends = twin or ("", None)
        self.first = mesh["pp"].get_local_rank() == 0
        self.whole: dict[str, Any] = dict(net.model.named_parameters())
        with torch.no_grad():
            self.local: dict[str, Tensor] = {n: p.to_local().detach() for n, p in self.whole.items()}
        self.boxes = {n: self._box(n, tuple(p.shape)) for n, p in self.whole.items()}
        for name, box in self.boxes.items():
            assert tuple(b - a for a, b in box) == tuple(self.local[name].shape), f"{name} is not where it should be"
        self.trained = {n: self.local[n].detach().requires_grad_() for n, p in self.whole.items() if p.requires_grad}

    def _box(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The range along each dim that this rank has."""
        ranges = [(0, n) for n in shape]
        dim = self.dims.get(name)
        if dim is not None:
            ranges[dim] = chunk(shape[dim], self.sizes[2], self.at[2])
        low, high = ranges[0]
        first, last = chunk(high - low, self.sizes[1], self.at[1])
        ranges[0] = (low + first, low + last)
        return tuple(ranges)

    def _is_main(self, name: str) -> bool:
        """Whether this rank is the first of those that have the same part."""
        copy = name == self.twin and not self.first
        return self.at[0] == 0 and (name in self.dims or self.at[2] == 0) and not copy

    # -- the gradient of a step ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        for name, leaf in self.trained.items():
            grad = self.whole[name].grad
            leaf.grad = torch.zeros_like(leaf) if grad is None else grad.to_local()
            if self.net.tp is not None and partial(name, self.dims):
                torch.distributed.all_reduce(leaf.grad, group=self.net.tp.get_group())
        if self.twin in self.trained:
            torch.distributed.all_reduce(self.trained[self.twin].grad, group=self.ends)

    def clip(self, limit: float | None) -> Tensor:
        grads = [leaf.grad for n, leaf in self.trained.items() if leaf.grad is not None and self._is_main(n)]
        grads = [g for g in grads if g.numel()]
        mine = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        norm = self.pool.sum(mine.double().square().to(self.net.device)).sqrt()
        weights = list(self.trained.values())
        torch.nn.utils.clip_grads_with_norm_(weights, math.inf if limit is None else limit, norm.to(weights[0]))
        return norm

    def clear(self) -> None:
        for name, leaf in self.trained.items():
            self.whole[name].grad = leaf.grad = None

    # -- all weights as boxes -----------------------------------------------------------------------------------------

    def shard(self, name: str, tensor: Tensor, *, prefix: str = "") -> Shard:
        offset = tuple(a for a, _ in self.boxes[name])
        return Shard(prefix + name, tuple(self.whole[name].shape), offset, tensor, self._is_main(name))

    def shards(self) -> list[Shard]:
        return [self.shard(name, tensor) for name, tensor in self.local.items()]

    def merged(self) -> list[Shard]:
        found = []
        layers = dict(self.model.named_modules())
        for shard in self.shards():
            if ".lora_" in shard.name:
                continue
            name = base_name(shard.name)
            tensor = shard.tensor
            if name != shard.name and name.endswith(".weight"):
                added = _delta(layers[name.rpartition(".")[0]], name)
                tensor = tensor + added[tuple(slice(a, b) for a, b in shard.box)].to(tensor)
            found.append(replace(shard, name=name, tensor=tensor))
        return found

    def written(self) -> None:
        self.net.release()

    def digest(self) -> str:
        return boxes.digest(self.pool.gather(boxes.sums(self.shards())))

    def whole_state(self) -> dict[str, Tensor] | None:
        """All weights on the first rank, adapters merged, and the buffers that are saved too; nothing on the others.

        They are sent there one part at a time. Buffers are whole on each rank of the stage that they are of.
        """
        saved, first = self.model.state_dict(), not any(self.at)
        buffers = {n: b for n, b in self.model.named_buffers() if n in saved}
        whole = [Shard(n, tuple(b.shape), (0,) * b.dim(), b, first) for n, b in buffers.items()]
        return self._gathered([*whole, *self.merged()])

    def whole_trained(self) -> dict[str, Tensor] | None:
        return self._gathered([s for s in self.shards() if s.name in self.trained])

    def _gathered(self, shards: list[Shard]) -> dict[str, Tensor] | None:
        """Weights on the first rank, put together of the parts that all ranks have; nothing on the others."""
        shards = [s for s in shards if s.main and s.tensor.numel()]
        lists = self.pool.gather([[s.name, s.shape, s.box, str(s.tensor.dtype)] for s in shards])
        if self.pool.place:
            for shard in shards:
                torch.distributed.send(shard.tensor.cpu().contiguous(), 0)
            return None
        found: dict[str, Tensor] = {}
        for name, shape, box, part in _arriving(shards, lists):
            if name not in found:
                found[name] = torch.empty(shape, dtype=part.dtype)
            found[name][tuple(slice(a, b) for a, b in box)] = part
        return found


def _arriving(shards: list[Shard], lists: list[Any]) -> Iterator[tuple[str, list[int], Any, Tensor]]:
    """Name, shape, box and tensor of this rank's parts, then of those that the others send."""
    for shard in shards:
        yield shard.name, list(shard.shape), shard.box, shard.tensor.cpu()
    for rank, listed in enumerate(lists[1:], 1):
        for name, shape, box, kind in listed:
            dtype = getattr(torch, kind.removeprefix("torch."))
            part = torch.empty([b - a for a, b in box], dtype=dtype)
            torch.distributed.recv(part, rank)
            yield name, shape, box, part


def _delta(layer: Any, name: str) -> Tensor:
    """What the adapters of a layer add to its weight, whole."""
    adapter = next(iter(getattr(layer, "lora_A", {})), None)
    if adapter is None or getattr(layer, "lora_bias", {}).get(adapter):
        raise ModelError(f"The adapters of '{name}' are of a kind that cannot be merged here.")
    low, high = (part[adapter].weight.full_tensor().detach() for part in (layer.lora_A, layer.lora_B))
    added = (high @ low) * layer.scaling[adapter]
    return added.T if getattr(layer, "fan_in_fan_out", False) else added
