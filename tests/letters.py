"""A small model over the letters a to f, and its tokenizer: for tests that need one and not what it says."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import flowrl as fl


def build_tokenizer() -> Any:
    words = ["<pad>", ";", *"abcdef"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")


def model_of(**config: Any) -> fl.Model:
    """A llama of these sizes."""
    plain = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return fl.Model(config={**plain, **ids, **config}, tokenizer=build_tokenizer)


#: One whose choices differ, and that is trained within seconds.
SMALL = model_of(
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=1,
    initializer_range=0.3,
)
