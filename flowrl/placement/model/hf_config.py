"""Which sizes a Hugging Face ``config.json`` describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ModelError, did_you_mean
from .model_shape import ModelShape

_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class _Family:
    """What a ``model_type`` fixes, where its configuration says nothing: ``_Family(qk_norm=True)``."""

    qkv_bias: bool = False
    biases: tuple[str, ...] = ()  # keys that add biases: attention_bias to q, k, v and o, mlp_bias to the rest
    qk_norm: bool = False
    tied: bool = False
    norms: tuple[str, ...] = ModelShape.norms
    experts: str = ""  # the key that counts them
    expert_width: str = ""
    shared: bool = False
    shared_count: str = ""  # the key that counts shared experts, each as wide as a routed one and without a gate
    latent: bool = False  # keys and values are made of a latent
    o_bias: bool = True  # whether attention_bias adds one to o too
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keys with another default than none


_DEEPSEEK = _Family(
    experts="n_routed_experts", expert_width="moe_intermediate_size", shared_count="n_shared_experts", latent=True
)
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(biases=("attention_bias", "mlp_bias")),
    "mistral": _Family(fixed={"num_key_value_heads": 8}),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(biases=("attention_bias",), qk_norm=True, fixed={"head_dim": 128}),
    "qwen2_moe": _Family(qkv_bias=True, experts="num_experts", expert_width="moe_intermediate_size", shared=True),
    "qwen3_moe": _Family(
        biases=("attention_bias",), qk_norm=True, experts="num_experts", expert_width="moe_intermediate_size"
    ),
    "mixtral": _Family(experts="num_local_experts", expert_width="intermediate_size", fixed={"num_key_value_heads": 8}),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _Family(
        biases=("attention_bias",),
        experts="n_routed_experts",
        expert_width="moe_intermediate_size",
        shared_count="n_shared_experts",
        o_bias=False,
    ),
    "gemma": _Family(biases=("attention_bias",), tied=True, fixed={"head_dim": 256}),
    "gemma2": _Family(biases=("attention_bias",), tied=True, norms=_FOUR_NORMS, fixed={"head_dim": 256}),
    "gemma3_text": _Family(
        biases=("attention_bias",), tied=True, qk_norm=True, norms=_FOUR_NORMS, fixed={"head_dim": 256}
    ),
}


def read_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Return the sizes that a configuration describes. Raises ModelError naming what is unknown or missing."""
    kind = str(config.get("model_type", ""))
    family = _FAMILIES.get(kind)
    title = name or str(config.get("_name_or_path") or kind)
    if family is None:
        raise _unknown(kind, title)
    need = _Needs(config, family.fixed, title)
    heads, layers = need("num_attention_heads"), need("num_hidden_layers")
    hidden = need("hidden_size")
    bias = "attention_bias" in family.biases and bool(config.get("attention_bias"))
    experts = _expert_count(config, family, need)
    chosen = need("num_experts_per_tok") if experts else 0
    width = need(family.expert_width) if experts else 0
    shared = need("shared_expert_intermediate_size") if experts and family.shared else 0
    if experts and family.shared_count:
        shared = width * need(family.shared_count, 0)
    return ModelShape(
        title,
        layers,
        hidden,
        need("intermediate_size"),
        heads,
        need("num_key_value_heads", heads),
        need("qk_nope_head_dim") + need("qk_rope_head_dim") if family.latent else need("head_dim", hidden // heads),
        need("vocab_size"),
        experts=experts,
        experts_per_token=chosen,
        expert_intermediate=width,
        shared_intermediate=shared,
        shared_gate=not family.shared_count,
        q_rank=need("q_lora_rank", 0) if family.latent else 0,
        kv_rank=need("kv_lora_rank") if family.latent else 0,
        rope_dim=need("qk_rope_head_dim") if family.latent else 0,
        value_dim=need("v_head_dim") if family.latent else 0,
        dense_layers=_dense_layers(config, layers) if experts else (),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias and family.o_bias,
        mlp_bias="mlp_bias" in family.biases and bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm or bool(config.get("use_qk_norm")),
        norms=family.norms,
        positions=_positions(config),
    )


@dataclass(frozen=True)
class _Needs:
    """Reads whole numbers of a configuration, and says which one is missing."""

    config: Mapping[str, Any]
    fixed: Mapping[str, Any]
    title: str

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = self.fixed.get(key, default)
        if value is None:
            raise ModelError(
                f"the configuration of '{self.title}' has no '{key}'.",
                have=self.config,
                fix=f"Give a whole config.json with {key}.",
            )
        if not isinstance(value, int) or value < 0:
            raise ModelError(f"the configuration of '{self.title}': {key} is {value!r}, not a whole number.")
        return value


def _positions(config: Mapping[str, Any]) -> int:
    """Tokens that a row may have; 0 where the configuration does not say it in the way that its backends read."""
    most = config.get("max_position_embeddings")
    return most if isinstance(most, int) and most > 0 else 0


def _expert_count(config: Mapping[str, Any], family: _Family, need: _Needs) -> int:
    if not family.experts:
        return 0
    if config.get(family.experts) is None:  # newer files use one name for all families
        return need("num_local_experts" if "num_local_experts" in config else family.experts)
    return need(family.experts)


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers without experts: those named, and all but every ``decoder_sparse_step``-th."""
    named: Iterable[int] = config.get("mlp_only_layers") or ()
    step = int(config.get("decoder_sparse_step") or 1)
    only = frozenset(named) | frozenset(range(int(config.get("first_k_dense_replace") or 0)))
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)


def _unknown(kind: str, title: str) -> ModelError:
    what = f"the weights of model_type '{kind}' are not known here" if kind else "its configuration names no model_type"
    return ModelError(
        f"'{title}': {what}, so neither its size nor its layout can be computed.",
        have=_FAMILIES,
        fix=did_you_mean(kind, _FAMILIES, "Describe it by a ModelShape, or use a model of those families."),
    )
