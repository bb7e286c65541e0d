"""A tiny model over the letters a to j, an actor of it, its prompts, and rows that it can be trained on."""

from __future__ import annotations

import torch

import flowrl as fl
from flowrl.batch import CallInfo

CHARS = "abcdefghij;"


def build_tokenizer():
    """A token per character; ``;`` ends a sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<pad>", *CHARS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")


EOS = 1 + CHARS.index(";")


MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 13,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "initializer_range": 0.3,  # far from uniform, so that wrong weights or places show
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


def fresh(**how):
    return fl.open(fl.Actor(MODEL, **{"max_tokens": 12, "lr": 1e-3, **how}), name="actor")  # the same to rows


def prompts(rows: int = 7, call: CallInfo | None = CallInfo(seed=1, program="p", step=2, op="actor.generate")):
    """Prompts of one to five letters."""
    ids = [[1 + (3 * i + j * j) % 10 for j in range(1 + i % 5)] for i in range(rows)]
    batch = fl.Batch.of(
        rows, prompt_ids=fl.Column.of(ids, dim="prompt", dtype="i32"), name=[f"row {i}" for i in range(rows)]
    )
    return batch.with_call(call)


def trained_rows(actor, rows: int = 6, n: int = 4, advantage: float = 1.0):
    """Generations with advantages of both signs."""
    made = actor.generate(prompts(rows), n=n)
    by_row = [advantage * (1.0, -0.5, 2.0, -1.5, 0.25)[i % 5] for i in range(len(made))]
    spread = torch.tensor(by_row).repeat_interleave(made.response_mask.lengths)
    return made.with_columns({"advantages": made.response_mask.with_values(spread)})
