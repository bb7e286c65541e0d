"""Sums of three digits with a calculator: ``3+8+5=`` is answered after two calls of the tool ``add``.

An episode reads ``3+8+5=`` *call of add(3, 8)* ``;[11]`` *call of add(11, 5)* ``;[16]16;``; the tool said what is in
brackets. A call is in the format of Hermes and Qwen, whose fixed parts are a token each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import flowrl as fl
from flowrl.environments import Environment, metric, reward

CHARS = "0123456789+=[]"
#: The fixed parts of a call: what comes before the first number, between the two, and after the second.
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %};{% endif %}{% endfor %}"
)


def build_tokenizer() -> Any:
    """A token for each character and each part of a call; ``;`` ends an answer. 20 tokens with padding and one more."""
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", ";", *CALL, *CHARS, "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    parts = Regex("|".join([*map(re.escape, CALL), "."]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(parts, "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";", padding_side="left")
    made.chat_template = TEMPLATE
    return made


#: A Qwen2 of 0.3 million parameters with random weights.
MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 20,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Calculator(Environment):
    """Sums of three digits: 1 where the last answer is the sum. A hundred sums are held out."""

    tools = (add,)
    turns = 4

    def rows(self) -> Sequence[dict[str, Any]]:
        """All tasks that are trained on, in an order of their own."""
        return [task(digits) for digits in _digits()[100:]]

    @reward()
    def right(self, response: str, answer: str) -> float:
        """Whether the last answer is the sum."""
        return float(response == answer)

    @metric
    def by_tool(self, state: Any, answer: str) -> float:
        """Whether the tool gave the sum."""
        return float(any(message["role"] == "tool" and message["content"] == answer for message in state.messages))


class HeldOut(Calculator):
    """Sums that no step of training has seen."""

    def rows(self) -> Sequence[dict[str, Any]]:
        """The tasks that are held out."""
        return [task(digits) for digits in _digits()[:100]]


def task(digits: Sequence[int]) -> dict[str, Any]:
    """A task: ``{"prompt": "3+8+5=", "answer": "16"}``."""
    return {"prompt": "+".join(map(str, digits)) + "=", "answer": str(sum(digits))}


def demonstrations(batch: int, *, seed: int = 0) -> fl.data.Source:
    """Conversations in which the tool is called as it should be, of tasks that are trained on, without end."""
    tasks = _digits()[100:]

    def draw(index: int) -> dict[str, Any]:
        a, b, c = random.Random(f"{seed} {index}").choice(tasks)
        return {
            "messages": [
                {"role": "user", "content": f"{a}+{b}+{c}="},
                {"role": "assistant", "content": f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}"},
                {"role": "tool", "content": str(a + b)},
                {"role": "assistant", "content": f"{CALL[0]}{a + b}{CALL[1]}{c}{CALL[2]}"},
                {"role": "tool", "content": str(a + b + c)},
                {"role": "assistant", "content": str(a + b + c)},
            ]
        }

    return fl.data.generated(draw, batch=batch, messages="messages")


def _digits() -> list[tuple[int, int, int]]:
    """All triples of digits, in an order of their own."""
    found = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    random.Random(0).shuffle(found)
    return found
