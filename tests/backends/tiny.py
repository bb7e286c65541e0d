"""Tiny models of many kinds, with random weights, for the tests of this folder."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl import rl
from flowrl.backends import open_engine
from flowrl.batch import Batch, CallInfo, Column
from flowrl.workers.model_options import Build, Model, Optim, Sampling

torch.set_num_threads(1)

VOCAB, EOS = 40, 13
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_LLAMA = {**_BASE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
CONFIGS = {
    "qwen2": {**_LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {**_LLAMA, "model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 8},
    "gemma2": {**_LLAMA, "model_type": "gemma2", "head_dim": 8},  # caps logits and attention; window 4096
    "gemma2-window": {**_LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 5},
    "mistral-window": {**_LLAMA, "model_type": "mistral", "sliding_window": 6},
    "mixtral": {**_LLAMA, **_MOE, "model_type": "mixtral"},
    "qwen3-moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "cohere": {**_LLAMA, "model_type": "cohere", "logit_scale": 0.25},
    "granite": {**_LLAMA, "model_type": "granite", "logits_scaling": 4.0},
    "phi": {**_LLAMA, "model_type": "phi"},  # a head with a bias
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "eos_token_id": EOS,
        "bos_token_id": 1,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "eos_token_id": EOS,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "eos_token_id": EOS,
    },
}
PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 14], [15, 16, 17, 18, 19], [20, 21, 22, 23, 24]]


def engine(kind="qwen2", *, sharpen=3.0, **build):
    """An engine with random weights; they are scaled up, so that its distributions are not flat."""
    opened = open_engine("hf", Build(Model(config=CONFIGS[kind]), **build))
    with torch.no_grad():
        for weight in opened.net.model.parameters():
            if weight.dim() > 1 and ".lora_" not in kind:
                weight.mul_(sharpen)
    opened.net.probe()
    return opened


def prompts(rows=PROMPTS, n=1, seed=3):
    """The prompts as a column, and the batch of their ``n`` rows each."""
    column = Column.of(rows, dim="prompt", dtype="i32")
    return column, Batch.of(len(rows), prompt_ids=column).with_call(CallInfo(seed=seed)).expand(n)


def rollouts(opened, n=4, rows=PROMPTS, seed=3, max_tokens=8):
    """Rows as an actor would make them, with rewards that differ within most groups."""
    column, batch = prompts(rows, n, seed)
    made = opened.generate(column, n, batch.row_seeds(), Sampling(max_tokens=max_tokens))
    pairs = zip(batch.prompt_ids.to_list(), made.ids.to_list(), strict=True)
    return rl.group_advantages(
        batch.with_columns(
            {
                "tokens": Column.of([a + b for a, b in pairs], dim="token", dtype="i32"),
                "response_mask": made.ids.with_values(torch.ones(len(made.ids.values), dtype=torch.bool)),
                "rollout_logprobs": made.rollout_logprobs,
                "rewards": Column.of([float(sum(r) % 3 == 0) for r in made.ids.to_list()], dtype="f32"),
            }
        )
    )


def whole_logits(opened, ids):
    """Logits [tokens, vocab] of one sequence from the model's own forward, without any cache."""
    with torch.no_grad():
        return opened.net.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def build_tokenizer(vocab=VOCAB):
    """A word-level tokenizer of ``vocab`` words: w0, w1, ..."""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"w{EOS}", pad_token="w0", unk_token="w0")


OPTIM = Optim(lr=1e-3)
