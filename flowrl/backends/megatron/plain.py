"""What of a transformers model is carried over to megatron-core, and what is not: said before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from ...placement.cluster.mesh import Mesh
from ...workers.model_options import Build

#: Kinds of models whose weights are known here.
KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_ELSEWHERE = "Name the backend fsdp2."


@dataclass(frozen=True)
class Plain:
    """What a transformers model is without its weights: ``Plain.of(model)``.

    ``shapes`` are those of its parameters by name, tied ones once. ``frequencies`` are those of its rotary embedding.
    ``padding`` is the token whose embedding is not trained where it is looked up.
    """

    config: Any
    shapes: Mapping[str, tuple[int, ...]]
    frequencies: Tensor
    tied: bool
    padding: int | None

    @staticmethod
    def of(model: Any) -> Plain:
        """From a loaded model. ModelError where megatron-core has no such model here."""
        config, rotary = model.config, getattr(model.base_model, "rotary_emb", None)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        head = model.get_output_embeddings()
        tied = head is not None and head.weight is model.get_input_embeddings().weight
        check_model(config, shapes, getattr(rotary, "attention_scaling", 1.0))
        assert rotary is not None, "models of the kinds that are known have one"
        padding = model.get_input_embeddings().padding_idx
        return Plain(config, shapes, rotary.inv_freq.detach().clone().float(), tied, padding)

    @property
    def head_dim(self) -> int:
        """The size of an attention head."""
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def vocab(self) -> int:
        """How many tokens are embedded."""
        return self.shapes["model.embed_tokens.weight"][0]

    @property
    def experts(self) -> int | None:
        """How many experts a layer has; None for a dense model."""
        stacks = [s[0] for n, s in self.shapes.items() if n.endswith(".experts.down_proj")]
        return stacks[0] if stacks else None

    def has(self, ending: str) -> bool:
        """Whether a weight's name ends like this."""
        return any(name.endswith(ending) for name in self.shapes)


def check_model(config: Any, shapes: Mapping[str, tuple[int, ...]], scaling: float) -> None:
    """Raise ModelError for what a model has that is not carried over."""
    if config.model_type not in KINDS:
        raise ModelError(
            f"The engine 'megatron' does not know models of the kind '{config.model_type}'.", have=KINDS, fix=_ELSEWHERE
        )
    layers = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    has = {
        "attention in a window": bool(window) or any(kind != "full_attention" for kind in layers),
        f"the activation '{config.hidden_act}'": config.hidden_act != "silu",
        "a bias outside of q, k and v": any(
            n.endswith(("o_proj.bias", "gate_proj.bias", "down_proj.bias")) for n in shapes
        ),
        "rotary embeddings that scale attention": scaling != 1.0,
        "rotary embeddings that change with the length": _rope_type(config) in ("dynamic", "longrope"),
        "layers with and without experts": _mixed(shapes),
        "noise in its router": bool(getattr(config, "router_jitter_noise", 0.0)),
    }
    lacking = [what for what, there in has.items() if there]
    if lacking:
        raise ModelError(f"The engine 'megatron' does not know models with {', '.join(lacking)}.", fix=_ELSEWHERE)


def _rope_type(config: Any) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def _mixed(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether only some layers have experts."""
    sparse = sum(n.endswith(".experts.down_proj") for n in shapes)
    dense = sum(n.endswith(".mlp.down_proj.weight") for n in shapes)
    return bool(sparse and dense)


def check_build(build: Build) -> None:
    """Raise ModelError for what this engine does not do."""
    if build.offload and torch.cuda.is_available():
        raise ModelError("The engine 'megatron' does not move its weights to the CPU between uses.", fix=_ELSEWHERE)
    if build.lora is not None:
        raise ModelError("The engine 'megatron' has no adapters.", fix=f"Leave lora= out. {_ELSEWHERE}")
    if build.freeze:
        raise ModelError("The engine 'megatron' trains all weights.", fix=f"Leave freeze= out. {_ELSEWHERE}")


def check_sizes(plain: Plain, mesh: Mesh, *, fused: bool) -> None:
    """Raise ModelError where the model cannot be cut like this."""
    config = plain.config
    groups, tp = config.num_key_value_heads, mesh["tp"]
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    sizes = {"attention heads": config.num_attention_heads, "columns": inner}
    for what, count in sizes.items():
        if count % tp:
            raise ModelError(f"{count} {what} do not divide by tp={tp}.", fix="Write another tp.")
    if groups % tp and tp % groups:
        raise ModelError(f"{groups} heads of keys and values do not fit tp={tp}.", fix="Write another tp.")
    if (tp - 1) * -(-plain.vocab // tp) >= plain.vocab:
        raise ModelError(f"A vocabulary of {plain.vocab} is too small for tp={tp}.", fix="Write a smaller tp.")
    if config.num_hidden_layers < mesh["pp"]:
        count = config.num_hidden_layers
        raise ModelError(f"{count} layers are too few for pp={mesh['pp']}.", fix="Write a smaller pp.")
    if plain.experts is None and mesh["ep"] > 1:
        raise ModelError(f"ep={mesh['ep']} splits experts, and the model has none.", fix="Write dp instead of ep.")
    if plain.experts is not None and plain.experts % mesh["ep"]:
        raise ModelError(f"{plain.experts} experts do not divide by ep={mesh['ep']}.", fix="Write another ep.")
    if plain.experts is not None and tp > 1 and not fused:
        raise ModelError(
            "A mixture of experts with tp > 1 needs sequence parallelism, and that needs Transformer Engine on CUDA.",
            fix="Write tp=1, and split the experts with ep.",
        )
    if mesh["cp"] > 1 and not fused:
        raise ModelError(f"cp={mesh['cp']} needs Transformer Engine on CUDA.", fix="Write cp=1.")
