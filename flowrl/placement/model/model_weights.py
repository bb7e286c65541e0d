"""Which weights a model has, and along which dim each one may be split.

Names and shapes are those of a Hugging Face checkpoint: query, key, value, gate and up apart from each other. Only the
experts of a layer are one weight each, stacked along dim 0, as current libraries hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model_shape import ModelShape

#: How tensor parallelism splits a weight of each kind: the dim, or None where every rank holds all of it.
TP_DIM: dict[str, int | None] = {
    "column": 0,
    "row": 1,
    "vocab": 0,
    "kv": 0,
    "replicated": None,
    "expert-column": 1,
    "expert-row": 2,
}


@dataclass(frozen=True)
class Weight:
    """One weight: ``Weight("model.layers.0.self_attn.k_proj.weight", (1024, 8192), "kv", 0, unit=128)``.

    ``kind`` is one of :data:`TP_DIM`. ``kv`` is split by whole heads, and ranks share a head where there are fewer
    heads than ranks. Experts are also split over ``ep``, along dim 0. ``unit``: rows that stay together when tensor
    parallelism splits (a head). ``layer`` is None before and after the layers; ``last`` tells which of the two.
    ``fused``: the weight that engines lay it into together with others, ``qkv`` or ``gate_up``.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int | None = None
    unit: int = 1
    fused: str = ""
    last: bool = False

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class Stack:
    """Equal weights of layers in a row: ``Stack(weight, first=0, layers=80)``, ``weight`` being that of ``first``.

    A weight outside the layers is a stack of one, with ``first`` 0.
    """

    weight: Weight
    first: int = 0
    layers: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, dims of the weight ...)."""
        return (self.layers, *self.weight.shape)

    def at(self, index: int) -> Weight:
        """Return the weight of one layer, ``index`` counted from ``first``."""
        w = self.weight
        if w.layer is None or not index:
            return w
        layer = self.first + index
        return replace(w, name=w.name.replace(f".{w.layer}.", f".{layer}.", 1), layer=layer)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its weights, in the order of their layers."""
        return tuple(weight.name for weight in self.weights())

    def weights(self) -> Iterator[Weight]:
        """Yield the weights that it stands for, in the order of their layers."""
        return (self.at(i) for i in range(self.layers))


def stacks_of(model: ModelShape) -> tuple[Stack, ...]:
    """Return the weights of a model, those equal from layer to layer as one stack. A tied head is not listed."""
    found: list[Stack] = []
    if model.vocab:
        found.append(Stack(Weight("model.embed_tokens.weight", (model.vocab, model.hidden), "vocab")))
    for first, count in _runs(model):
        found += [Stack(w, first, count) for w in _layer(model, first)]
    if model.vocab:
        found.append(Stack(Weight("model.norm.weight", (model.hidden,), "replicated", last=True)))
        if not model.tied:
            found.append(Stack(Weight("lm_head.weight", (model.vocab, model.hidden), "vocab", last=True)))
    return tuple(found)


def _runs(model: ModelShape) -> Iterator[tuple[int, int]]:
    """Layers of one make that follow each other: (first, how many)."""
    first = 0
    for layer in range(1, model.layers + 1):
        if layer == model.layers or model.is_sparse(layer) != model.is_sparse(first):
            yield first, layer - first
            first = layer


def _layer(model: ModelShape, layer: int) -> Iterable[Weight]:
    at = f"model.layers.{layer}."
    if not model.heads:  # the uniform model of the formulas
        return [Weight(f"{at}weight", (model.intermediate, model.hidden), "column", layer)]
    mlp = _experts(model, layer, f"{at}mlp.") if model.is_sparse(layer) else _mlp(model, layer, f"{at}mlp.")
    norms = [Weight(f"{at}{n}.weight", (model.hidden,), "replicated", layer) for n in model.norms]
    attention = _latent_attention if model.kv_rank else _attention
    return [*attention(model, layer, f"{at}self_attn."), *mlp, *norms]


def _attention(model: ModelShape, layer: int, at: str) -> Iterator[Weight]:
    hidden, unit = model.hidden, model.head_dim
    for name, heads, kind in (("q", model.heads, "column"), ("k", model.kv_heads, "kv"), ("v", model.kv_heads, "kv")):
        yield Weight(f"{at}{name}_proj.weight", (heads * unit, hidden), kind, layer, unit, "qkv")
        if model.qkv_bias:
            yield Weight(f"{at}{name}_proj.bias", (heads * unit,), kind, layer, unit, "qkv_bias")
    yield Weight(f"{at}o_proj.weight", (hidden, model.heads * unit), "row", layer, unit)
    if model.o_bias:
        yield Weight(f"{at}o_proj.bias", (hidden,), "replicated", layer)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield Weight(f"{at}{name}.weight", (unit,), "replicated", layer)


def _latent_attention(model: ModelShape, layer: int, at: str) -> Iterator[Weight]:
    hidden, unit, value = model.hidden, model.head_dim, model.value_dim
    if model.q_rank:
        yield Weight(f"{at}q_a_proj.weight", (model.q_rank, hidden), "replicated", layer)
        yield Weight(f"{at}q_a_layernorm.weight", (model.q_rank,), "replicated", layer)
        yield Weight(f"{at}q_b_proj.weight", (model.heads * unit, model.q_rank), "column", layer, unit)
    else:
        yield Weight(f"{at}q_proj.weight", (model.heads * unit, hidden), "column", layer, unit)
    yield Weight(f"{at}kv_a_proj_with_mqa.weight", (model.kv_rank + model.rope_dim, hidden), "replicated", layer)
    yield Weight(f"{at}kv_a_layernorm.weight", (model.kv_rank,), "replicated", layer)
    both = unit - model.rope_dim + value  # of a head: its key without positions, and its value
    yield Weight(f"{at}kv_b_proj.weight", (model.heads * both, model.kv_rank), "column", layer, both)
    yield Weight(f"{at}o_proj.weight", (hidden, model.heads * value), "row", layer, value)


def _mlp(model: ModelShape, layer: int, at: str, intermediate: int = 0) -> Iterator[Weight]:
    hidden, inner = model.hidden, intermediate or model.intermediate
    for name, shape, kind in (
        ("gate", (inner, hidden), "column"),
        ("up", (inner, hidden), "column"),
        ("down", (hidden, inner), "row"),
    ):
        fused = "" if name == "down" else f"{at}gate_up"
        yield Weight(f"{at}{name}_proj.weight", shape, kind, layer, fused=fused)
        if model.mlp_bias:
            yield Weight(
                f"{at}{name}_proj.bias",
                shape[:1],
                kind if name != "down" else "replicated",
                layer,
                fused=fused and f"{fused}_bias",
            )


def _experts(model: ModelShape, layer: int, at: str) -> Iterator[Weight]:
    hidden, inner, experts = model.hidden, model.expert_intermediate, model.experts
    yield Weight(f"{at}gate.weight", (experts, hidden), "replicated", layer)
    for name in ("gate", "up"):
        yield Weight(f"{at}experts.{name}_proj.weight", (experts, inner, hidden), "expert-column", layer)
    yield Weight(f"{at}experts.down_proj.weight", (experts, hidden, inner), "expert-row", layer)
    if model.shared_intermediate and not model.shared_gate:
        yield from _mlp(model, layer, f"{at}shared_experts.", model.shared_intermediate)
    elif model.shared_intermediate:
        yield from _mlp(model, layer, f"{at}shared_expert.", model.shared_intermediate)
        yield Weight(f"{at}shared_expert_gate.weight", (1, hidden), "replicated", layer)
