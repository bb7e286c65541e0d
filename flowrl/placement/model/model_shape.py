"""How large a language model is: its sizes, and the parameters and bytes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .model_weights import Stack, Weight, stacks_of


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer with gated feed-forward layers, dense or with experts.

    >>> model = shape_named("qwen3-30b-a3b")
    >>> model.layers, model.experts, model.parameters, model.active_parameters
    (48, 128, 30532122624, 3353032704)

    ``heads`` query heads share ``kv_heads`` heads of keys and values, each ``head_dim`` wide. With ``experts``, every
    token goes through ``experts_per_token`` of them, each ``expert_intermediate`` wide, and through a shared one of
    ``shared_intermediate``; ``dense_layers`` are those without experts. ``tied``: the head is the embedding.
    ``kv_rank``: keys and values are made of a latent of so many numbers and a part with positions of ``rope_dim``,
    which are all that a cache keeps (multi-head latent attention, arXiv:2405.04434, section 2.1); queries of one of
    ``q_rank``, where that is said; ``head_dim`` is then that of a query, ``value_dim`` that of a value.
    ``shared_gate``: the shared expert has a gate. ``norms``: the norms of a layer over ``hidden``. ``dtype_bytes``:
    bytes per parameter, 2 for bfloat16. ``positions``: tokens that a row may have, 0 where that is not said.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    shared_gate: bool = True
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    dtype_bytes: int = 2
    positions: int = 0

    @staticmethod
    def uniform(layers: int, columns: int, width: int = 1, *, dtype_bytes: int = 2) -> ModelShape:
        """Return the model of HybridFlow's formulas: a layer is one weight (columns, width), split by tp along dim 0.

        >>> ModelShape.uniform(4, 8).bytes
        64.0
        """
        return ModelShape("uniform", layers, width, columns, 0, 0, 0, 0, dtype_bytes=dtype_bytes)

    @staticmethod
    def from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
        """Read a Hugging Face ``config.json``. Raises ModelError for another kind, or a missing key."""
        from .hf_config import read_config

        return read_config(config, name)

    @property
    def parameters(self) -> int:
        """How many there are; tied ones once."""
        return self._counts[0]

    @property
    def active_parameters(self) -> int:
        """How many take part in one token: all but the experts that it does not go through."""
        return self._counts[1]

    @property
    def bytes(self) -> float:
        """Parameters times ``dtype_bytes``."""
        return float(self.parameters * self.dtype_bytes)

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers, or their latents, in ``dtype_bytes`` each."""
        if self.kv_rank:
            return float(self.layers * (self.kv_rank + self.rope_dim) * self.dtype_bytes)
        return float(2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes)

    @property
    def attention_width(self) -> int:
        """Numbers of all heads that a token meets of another: those of its key and of its value."""
        return self.heads * (self.head_dim + (self.value_dim or self.head_dim))

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The weights, with equal layers as one stack."""
        return stacks_of(self)

    def weights(self) -> tuple[Weight, ...]:
        """Return the weights, layer by layer the same; names and shapes as in a Hugging Face checkpoint."""
        return tuple(w for stack in self.stacks for w in stack.weights())

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @cached_property
    def _counts(self) -> tuple[int, int]:
        total = active = 0
        for stack in self.stacks:
            count = stack.layers * stack.weight.elements
            total += count
            expert = stack.weight.kind.startswith("expert")
            active += count * self.experts_per_token // self.experts if expert else count
        return total, active


def shape_named(name: str) -> ModelShape:
    """Return the model of that name: a shipped one, a folder with ``config.json``, or a hub name in the local cache.

    >>> shape_named("Llama-70B").parameters
    68976648192

    Nothing is downloaded. Raises ModelError with the nearest name.
    """
    from .zoo import find_shape

    return find_shape(name)
