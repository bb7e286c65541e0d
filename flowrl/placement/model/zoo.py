"""Which models are known by name, without a download: shipped sizes, folders, and the local Hugging Face cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...errors import ModelError, did_you_mean
from ...hub import cached_file
from .model_shape import ModelShape


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    positions: int = 4096,
    vocab: int = 32000,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, kv_heads: int = 8, tied: bool = False, moe: int = 0
) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": moe} if moe else {}
    return {
        "model_type": "qwen3_moe" if moe else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        **experts,
    }


def _deepseek(layers: int, heads: int, experts: int, *, dense: int, vocab: int, positions: int) -> dict[str, Any]:
    """DeepSeek-V3 (arXiv:2412.19437, section 4.2) and its kin, without the layers that predict further tokens."""
    return {
        "model_type": "deepseek_v3",
        "max_position_embeddings": positions,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": dense,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


def _glm(
    hidden: int, intermediate: int, layers: int, experts: int, moe: int, *, dense: int, norm: bool
) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe",
        "max_position_embeddings": 131072,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": norm,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": moe,
        "first_k_dense_replace": dense,
        "vocab_size": 151552,
        "tie_word_embeddings": False,
    }


#: Name: (the hub repository whose config.json has these sizes, the sizes).
SHIPPED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-7b": ("meta-llama/Llama-2-7b-hf", _llama(4096, 11008, 32, 32, 32)),
    "llama-13b": ("meta-llama/Llama-2-13b-hf", _llama(5120, 13824, 40, 40, 40)),
    "llama-34b": ("codellama/CodeLlama-34b-hf", _llama(8192, 22016, 48, 64, 8, positions=16384)),
    "llama-70b": ("meta-llama/Llama-2-70b-hf", _llama(8192, 28672, 80, 64, 8)),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", _llama(4096, 14336, 32, 32, 8, positions=131072, vocab=128256)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", _llama(8192, 28672, 80, 64, 8, positions=131072, vocab=128256)),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", _llama(16384, 53248, 126, 128, 8, positions=131072, vocab=128256)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, tied=True)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", _qwen3(2048, 6144, 28, 16, tied=True)),
    "qwen3-4b": ("Qwen/Qwen3-4B", _qwen3(2560, 9728, 36, 32, tied=True)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _qwen3(4096, 12288, 36, 32)),
    "qwen3-14b": ("Qwen/Qwen3-14B", _qwen3(5120, 17408, 40, 40)),
    "qwen3-32b": ("Qwen/Qwen3-32B", _qwen3(5120, 25600, 64, 64)),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _qwen3(2048, 6144, 48, 32, kv_heads=4, moe=768)),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", _qwen3(4096, 12288, 94, 64, kv_heads=4, moe=1536)),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _deepseek(61, 128, 256, dense=3, vocab=129280, positions=163840),
    ),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct", _deepseek(61, 64, 384, dense=1, vocab=163840, positions=131072)),
    "glm-4.5": ("zai-org/GLM-4.5", _glm(5120, 12288, 92, 160, 1536, dense=3, norm=True)),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air", _glm(4096, 10944, 46, 128, 1408, dense=1, norm=False)),
}


def find_shape(name: str) -> ModelShape:
    """Return a shipped model, a folder with ``config.json``, or a hub name in the local cache. Raises ModelError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read(folder / "config.json", name)
    for short, (hub, config) in SHIPPED.items():
        if name.lower() in (short, hub.lower()):
            return ModelShape.from_config(config, short)
    cached = cached_file(name, "config.json")
    if cached is not None:
        return _read(cached, name)
    last = name.lower().rpartition("/")[2]
    raise ModelError(
        f"no model '{name}' is known: it is no shipped one, no folder, and not in the Hugging Face cache.",
        have=", ".join(SHIPPED),
        fix=did_you_mean(last, SHIPPED, "Name a folder with config.json, or fetch the model once."),
    )


def _read(path: Path, name: str) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"The folder '{name}' holds no config.json, so it is no saved model.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"the config.json of '{name}' cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ModelError(f"the config.json of '{name}' is no mapping of names.")
    return ModelShape.from_config(cast("dict[str, Any]", config), name)
