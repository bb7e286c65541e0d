"""A model split over ranks, as the engine runs it: weights are gathered layer by layer where a pass needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from ...placement.model.weight_layout import chunk
from ..hf.logits import Head
from ..hf.net import Found, Net, tolerance
from . import split


class Root(torch.nn.Module):
    """The model as one module whose forward is any computation with it: ``root(lambda: body(ids) @ head.T)``.

    FSDP gathers what belongs to no layer (embedding, last norm, head) when it is called, and reduces its gradients
    when the backward pass is through.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedNet(Net):
    """A net on ranks: made of a model with or without its weights, then :meth:`shard` leaves this rank its part."""

    generates = False
    root: Any = None
    tp: Any = None  # the mesh of tensor parallel, where there is one

    def shard(self, mesh: Any, device: torch.device, *, offload: bool) -> None:
        """Keep this rank's part on the mesh ``dp, fsdp, tp``: of weights that are not there, room for it."""
        tied = self._is_tied()
        if mesh["tp"].size() > 1:
            self.tp = mesh["tp"]
            split.split(self.model, self.kind, self.tp)
        self.root = _fully_shard(self, mesh["dp", "fsdp"] if mesh["dp"].size() > 1 else mesh["fsdp"], device, offload)
        _make_room(self.root, torch.device("cpu") if offload else device)
        assert tied == self._is_tied(), "tied weights stay tied"
        self._shape = replace(self._shape, weight=self.output.weight)  # not the whole one that was there before
        self.device = device

    def check(self, before: Tensor) -> None:
        """Raise ModelError where the parts do not give the hidden states that the whole model did."""
        worst = self._apart(before)
        if not worst < tolerance(self.compute):
            raise ModelError(
                f"The hidden states of {type(self.model).__name__}, split over ranks, differ by {worst:.1e} of their "
                "size from those of the whole model.",
                fix="Use fsdp alone, or another model.",
            )

    def run(self, compute: Callable[[], Found]) -> Found:
        return self.root(compute)

    def before_pass(self, *, last: bool) -> None:
        self.root.set_requires_all_reduce(last)  # replicas are told of the sum of all passes

    def reset(self) -> None:
        self.root.reset_iter_state()

    @contextmanager
    def reading(self) -> Iterator[None]:
        with torch.no_grad():
            try:
                yield
            finally:
                self.release()

    def release(self) -> None:
        """Let go of gathered weights."""
        for module in self.root.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    @property
    def head(self) -> Head:
        head = super().head
        if self.tp is None:
            return head
        first, _ = chunk(head.weight.shape[0], self.tp.size(), self.tp.get_local_rank())
        weight, bias = _local(head.weight), None if head.bias is None else _local(head.bias)
        return Head(weight, bias, head.scale, head.softcap, head.compute, self.tp.get_group(), first)

    def _is_tied(self) -> bool:
        return self.output.weight is self.model.get_input_embeddings().weight

    def tried(self) -> Tensor:
        """Hidden states of a few tokens, on the CPU."""
        ids = self._few()

        def compute() -> Tensor:
            with self.mixed():
                return self.hidden(ids)

        if self.root is None:
            with torch.no_grad():
                return compute().double().cpu()
        with self.reading():
            return self.run(compute).double().cpu()

    def _apart(self, before: Tensor) -> float:
        """How far the hidden states of those tokens are by now from what they were, as a share of their size."""
        return distance(self.tried(), before)

    def _few(self) -> Tensor:
        return (torch.arange(6, device=self.device)[None] * 7 + 3) % self.model.get_input_embeddings().weight.shape[0]


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the size of what is wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def _local(weight: Any) -> Tensor:
    """This rank's part of a DTensor, with gradient."""
    return weight.to_local()


def _fully_shard(net: ShardedNet, mesh: Any, device: torch.device, offload: bool) -> Root:
    """FSDP over the layers and over what is left; gradients are summed, not averaged."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if any(p.dim() == 0 for p in net.model.parameters()):
        raise ModelError(
            f"{type(net.model).__name__} has weights that are single numbers, which fsdp cannot split.",
            fix="Use another model, or the engine hf on one device.",
        )
    how: dict[str, Any] = {"mesh": mesh}
    if net.weights_dtype != net.compute:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=net.compute, reduce_dtype=net.weights_dtype)
    if offload and device.type == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    else:
        how["offload_policy"] = OffloadPolicy()
    for layer in layers_of(net.model):
        fully_shard(layer, **how)
    root: Any = Root(net.model)
    fully_shard(root, **how)
    for module in (root, *layers_of(net.model)):
        module.set_gradient_divide_factor(1.0)  # a row's weight is that in the loss of all rows
        module.set_force_sum_reduction_for_comms(True)
    return root


def _make_room(root: Any, device: torch.device) -> None:
    """Give weights that are not there memory for this rank's part of them, with whatever numbers are in it."""
    if not any(weight.is_meta for weight in root.parameters()):
        return
    with torch.no_grad():
        root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def layers_of(model: Any) -> list[Any]:
    """The layers that are here, which are gathered one at a time: those of the module list with most weights."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    sizes = [sum(p.numel() for p in m.parameters()) for m in lists]
    layers = lists[sizes.index(max(sizes))] if lists else []
    return [layer for layer in layers if next(layer.parameters(), None) is not None]
