"""A model of a few thousand parameters in a folder, as the hub has large ones: for programs that name one of the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

WORDS = ["<pad>", ";", *"0123456789+=", "?", "_"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}"


def save_small_chat(folder: Path) -> None:
    """Write a Qwen2 with random weights; what its tokenizer does not know is ``?``, and ``;`` ends a response."""
    _save(folder, WORDS, Qwen2ForCausalLM)


def save_small_reward(folder: Path) -> None:
    """Write a reward model with another vocabulary than that of the small chat."""
    _save(folder, [*WORDS[:2], *reversed(WORDS[2:])], Qwen2ForSequenceClassification, num_labels=1)


def _save(folder: Path, words: list[str], kind: type, **more: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";", padding_side="left")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2Config(
        vocab_size=len(WORDS), max_position_embeddings=1024, num_key_value_heads=2, **sizes, **ids, **more
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(str(folder))
