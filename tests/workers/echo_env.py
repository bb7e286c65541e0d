"""An environment that says back what it hears, a tiny model whose tokens can be read in two ways, and its prompts."""

from __future__ import annotations

import flowrl as fl
from flowrl.batch import CallInfo

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def build_tokenizer():
    """Letters, and pairs of them as tokens of their own: ``a`` and ``b`` sampled one by one read "ab", another token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", ";", "a", "b", "c", "d", "ab", "cd", "bc", "aa"]
    merges = [("a", "b"), ("c", "d"), ("b", "c"), ("a", "a")]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")


LETTERS = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 10,
        **SMALL,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


class Echo(fl.Env):
    """Says back the last letter of an action and "ab"; over once ``ends`` letters were said. State: all actions."""

    turns = 6

    def __init__(self, ends: int = 12, begins: str = "cd"):
        self.ends, self.begins = ends, begins

    def reset(self, row, seed):
        SEEN[row["name"], seed] = ()
        return (row["name"], seed), self.begins

    def step(self, state, action):
        state = (*state, action)
        said = sum(len(a) for a in state[2:])
        SEEN[state[0], state[1]] = state[2:]
        return state, action[-1:] + "ab", len(action) / 10, said >= self.ends


SEEN: dict[tuple, tuple] = {}


def prompts(rows: int = 5, **columns):
    tokenizer = build_tokenizer()
    ids = [tokenizer.encode("abcdabcd"[: 1 + i]) for i in range(rows)]
    return fl.Batch.of(
        rows,
        prompt_ids=fl.Column.of(ids, dim="prompt", dtype="i32"),
        name=fl.Column.of([f"row {i}" for i in range(rows)], dtype="any"),
    ).with_call(CallInfo(seed=4, op="echo.rollout"))
