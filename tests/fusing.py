"""What engines keep of a checkpoint's weights, by plain code on arrays: split, stack, put one behind the other."""

from __future__ import annotations

import numpy as np

from flowrl.placement.model.model_shape import ModelShape

SIZES = {
    "hidden_size": 6,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 150,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, heads for all": {"model_type": "qwen2", "num_key_value_heads": 8},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "experts": {"model_type": "qwen3_moe", **_EXPERTS},
    "a shared expert": {"model_type": "qwen2_moe", **_SHARED},
}
MODELS = {name: ModelShape.from_config({**SIZES, **config}, name) for name, config in CONFIGS.items()}


def checkpoint(model):
    """Every weight as an array of numbers that are all different, and none of them 0."""
    found, first = {}, 1
    for weight in model.weights():
        found[weight.name] = np.arange(first, first + weight.elements, dtype=np.float64).reshape(weight.shape)
        first += weight.elements
    return found


def fuse(whole, model, *, tp, rank, experts=None):
    """The parameters of a rank of an engine without stages.

    ``experts``: (how many have a part of the experts each, which of them this is), where ranks have whole ones.
    """
    found = {}
    for name, weight in whole.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -(-len(weight) // 64) * 64
            padded = np.concatenate([weight, np.zeros((rows - len(weight), weight.shape[1]))])
            found[name] = np.split(padded, tp)[rank]
        elif name.endswith(("norm.weight", "mlp.gate.weight", "expert_gate.weight", "o_proj.bias", "down_proj.bias")):
            found[name] = weight
        elif name.endswith(("o_proj.weight", "down_proj.weight")) and ".experts." not in name:
            found[name] = np.split(weight, tp, axis=1)[rank]
        elif ".q_proj." in name:
            keys, values = (whole[name.replace(".q_proj.", f".{n}_proj.")] for n in "kv")
            fused = [np.split(weight, tp)[rank], *(_heads(w, model.kv_heads, tp, rank) for w in (keys, values))]
            found[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(fused)
        elif ".gate_proj." in name and ".experts." not in name:
            both = weight, whole[name.replace(".gate_proj.", ".up_proj.")]
            fused = [np.split(w, tp)[rank] for w in both]
            found[name.replace(".gate_proj.", ".gate_up_proj.")] = np.concatenate(fused)
        elif name.endswith(".experts.gate_proj.weight"):
            at = name.removesuffix(".gate_proj.weight")
            gate, up, down = (whole[f"{at}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            w13, w2 = [], []
            for number in range(len(gate)):
                g, u, d = gate[number], up[number], down[number]
                if experts is None:
                    g, u, d = np.split(g, tp)[rank], np.split(u, tp)[rank], np.split(d, tp, axis=1)[rank]
                w13.append(np.concatenate([g, u]))
                w2.append(d)
            if experts is not None:
                w13, w2 = (list(np.array_split(np.stack(w), experts[0])[experts[1]]) for w in (w13, w2))
            found[f"{at}.w13_weight"], found[f"{at}.w2_weight"] = np.stack(w13), np.stack(w2)
    return found


def _heads(weight, heads, tp, rank):
    """The heads of keys or values of a rank: its part, or one that it shares with its neighbours."""
    if heads >= tp:
        return np.split(weight, tp)[rank]
    return np.split(weight, heads)[rank // (tp // heads)]
