"""Small models whose sizes are easy to follow by hand: a dense one with tied weights, and a mixture of experts."""

from __future__ import annotations

from flowrl.placement.model.model_shape import ModelShape


def shapes(hidden: int) -> tuple[ModelShape, ModelShape]:
    """The dense one, and the one with experts."""
    small = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 13,
        "tie_word_embeddings": True,
    }
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    return ModelShape.from_config(small, "dense"), ModelShape.from_config({**small, **experts}, "experts")
