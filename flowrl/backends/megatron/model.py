"""A stage of a model in megatron-core, made from what a transformers model says of itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...placement.model.weight_layout import layers_of_stage
from ...workers.model_options import Build
from .parallel import Parallel
from .plain import Plain, check_sizes


def fused() -> bool:
    """Whether Transformer Engine is here; on CUDA its layers are used then."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        return False
    return True


def transformer_config(plain: Plain, build: Build, parallel: Parallel, compute: torch.dtype) -> Any:
    """megatron-core's description of the model and of how it runs."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config, mesh, te = plain.config, parallel.mesh, fused()
    cuda = torch.cuda.is_available()
    check_sizes(plain, mesh, fused=te)
    given: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": plain.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "qk_layernorm": plain.has("q_norm.weight"),
        "add_qkv_bias": plain.has("q_proj.bias"),
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": mesh["tp"],
        "pipeline_model_parallel_size": mesh["pp"],
        "context_parallel_size": mesh["cp"],
        "expert_model_parallel_size": mesh["ep"],
        "expert_tensor_parallel_size": mesh["tp"],
        "sequence_parallel": te and mesh["tp"] > 1,
        "params_dtype": compute,
        "pipeline_dtype": compute,
        "bf16": compute == torch.bfloat16,
        "variable_seq_lengths": True,
        "batch_p2p_comm": cuda,
        "calculate_per_token_loss": True,  # losses and gradients are sums: what they weigh is in the loss
        "perform_initialization": False,
        "use_cpu_initialization": not cuda,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": te,
        "bias_dropout_fusion": te,
        "apply_rope_fusion": te,
        "persist_layer_norm": te,
        "attention_softmax_in_fp32": True,
        "moe_token_dispatcher_type": "alltoall",  # also for a dense model: the default asks for equal lengths
    }
    if mesh["pp"] > 1:
        given["pipeline_model_parallel_layout"] = stages(config.num_hidden_layers, mesh["pp"])
    if plain.experts is not None:
        given |= _experts(plain, config)
    if build.gradient_checkpointing and cuda:  # on the CPU it saves the state of CUDA's generators
        given |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**given)


def _experts(plain: Plain, config: Any) -> dict[str, Any]:
    """Settings of a mixture of experts whose router is the model's own, without a loss that balances it."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    renormalised = getattr(config, "norm_topk_prob", None)
    return {
        "num_moe_experts": plain.experts,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": renormalised is False,  # else softmax over the chosen ones alone
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def stages(layers: int, count: int) -> list[list[str]]:
    """What is on each stage of a pipeline, the first ones with a layer more where they do not divide.

    >>> stages(3, 2)
    [['embedding', 'decoder', 'decoder'], ['decoder', 'loss']]
    """
    spans = [layers_of_stage(layers, count, i) for i in range(count)]
    found = [["decoder"] * (b - a) for a, b in spans]
    found[0].insert(0, "embedding")
    found[-1].append("loss")
    return found


def build_stage(plain: Plain, build: Build, parallel: Parallel, config: Any) -> Any:
    """The part of the model that this rank runs, its weights not yet given.

    It gives hidden states [tokens, sequences, hidden], on the last stage normed; the head is applied by who asks.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    class Stage(GPTModel):
        """A stage whose last one gives hidden states too."""

        def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
            return hidden_states

    experts, norm = plain.experts, config.qk_layernorm
    if fused():
        spec = specs.get_gpt_layer_with_transformer_engine_spec(experts, False, norm)
    else:
        spec = specs.get_gpt_layer_local_spec(experts, False, norm, normalization="RMSNorm")
    stage = Stage(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(plain.vocab, parallel.mesh["tp"]),
        max_sequence_length=getattr(plain.config, "max_position_embeddings", 1 << 20),
        pre_process=parallel.first,
        post_process=parallel.last,
        share_embeddings_and_output_weights=plain.tied,
        position_embedding_type="rope",
    )
    if build.head == "scalar" and parallel.last:
        stage.output_layer = None  # type: ignore[assignment]
        stage.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _mark_split(stage)
    stage.to(device=device, dtype=config.params_dtype).eval()
    stage.rotary_pos_emb.inv_freq = plain.frequencies.to(device)
    if parallel.first and plain.padding is not None:
        words = stage.embedding.word_embeddings
        words.register_forward_hook(partial(_untrained, plain.padding, parallel, config.sequence_parallel))
    return stage


def _mark_split(stage: Any) -> None:
    """Tell megatron-core which weights ``tp`` splits: it notes that where it draws them, and its norm goes by it."""
    from megatron.core import tensor_parallel as layers

    dims = {layers.ColumnParallelLinear: 0, layers.VocabParallelEmbedding: 0, layers.RowParallelLinear: 1}
    for module in stage.modules():
        weight = getattr(module, "weight", None)
        if type(module) in dims and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            layers.set_tensor_model_parallel_attributes(weight, True, dims[type(module)], 1)


def _untrained(
    padding: int, parallel: Parallel, scattered: bool, _: Any, given: tuple[Tensor, ...], out: Tensor
) -> Tensor:
    """Embeddings without a gradient for the padding token, as those of transformers are."""
    at = given[0] == padding  # [sequences, tokens], as what is embedded unless that is [part of tokens, sequences]
    if scattered:
        at = at.T.chunk(parallel.mesh["tp"])[parallel["tp"]]
    return torch.where(at[..., None], out.detach(), out)


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary in equal parts, rounded up."""
    return -(-vocab // tp) * tp
