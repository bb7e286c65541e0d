"""Chat templates that keep, forget, rewrite and refuse, and a tokenizer of characters that has one of them."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Qwen3 does: what an answer thought is left out once it is not the last.
FORGETS = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
REWRITES = CHATML.replace("{{ m.content }}", "{{ m.content | lower }}")
REFUSES = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}x"


def chat_tokenizer(template) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    made.add_tokens(["<|im_start|>", "<think>", "</think>"], special_tokens=True)
    made.chat_template = template
    return made
