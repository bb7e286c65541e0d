"""A game of several turns: the policy guesses a digit and is told whether the secret is smaller or greater.

An episode reads ``?5>8<7=``: the prompt ``?``, guesses 5, 8 and 7, and what the environment said to each:
``>`` the secret is greater, ``<`` it is smaller, ``=`` found.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import flowrl as fl

CHARS = "0123456789<>=?;"


def build_tokenizer() -> Any:
    """One token per character; ``;`` ends a sequence. 16 tokens with padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<pad>", *CHARS])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";", padding_side="left")


#: A Qwen2 of 0.08 million parameters with random weights.
MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,  # with the usual 0.02, made for wide models, it learns several times slower
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1 + CHARS.index(";"),
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


def prompts(batch: int, *, seed: int = 0) -> fl.data.Source:
    """``batch`` games a step, without end: the column ``secret`` is the digit to find."""

    def draw(index: int) -> dict[str, Any]:
        return {"prompt": "?", "secret": random.Random(f"{seed} {index}").randrange(10)}

    return fl.data.generated(draw, batch=batch)


def every_game() -> fl.data.Source:
    """The ten games there are, one for each secret, as one batch."""
    rows = [{"prompt": "?", "secret": secret} for secret in range(10)]
    return fl.data.rows(rows, batch=10, shuffle=False, repeat=False)


@dataclass(frozen=True)
class State:
    """A game under way: ``State(secret=7, guesses=1, low=6)`` after the guess 5; 6 to 9 are left."""

    secret: int
    guesses: int = 0
    low: int = 0
    high: int = 9


class Guess(fl.Env):
    """Find the secret digit. Reward 1/k when it is found with the k-th guess, 0 when it is not found.

    A guess is the first character of an action; one that is no digit is answered with ``?`` and counts.
    Play it with ``game.rollout(batch, policy=actor, n=8, turn_tokens=1)``: a guess is one token.
    """

    def __init__(self, turns: int = 5) -> None:
        self.turns = turns

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[State, str]:
        """A game for the row's ``secret``; where it has none, the seed chooses one."""
        secret = row["secret"] if "secret" in row else seed % 10
        return State(int(secret)), ""

    def step(self, state: State, action: str) -> tuple[State, str, float, bool]:
        """Compare the guess with the secret."""
        guesses = state.guesses + 1
        guess = int(action[:1]) if action[:1] in set("0123456789") else None
        if guess is None:
            return replace(state, guesses=guesses), "?", 0.0, False
        if guess == state.secret:
            return State(state.secret, guesses, guess, guess), "=", 1 / guesses, True
        if guess < state.secret:
            return replace(state, guesses=guesses, low=max(state.low, guess + 1)), ">", 0.0, False
        return replace(state, guesses=guesses, high=min(state.high, guess - 1)), "<", 0.0, False

    def anchor(self, state: State, observation: str) -> tuple[int, int]:
        """The digits still possible, as bounds: however they were found, the next guess has the same to find out.

        The number of guesses is left out, though the reward depends on it: more turns have their like in other games.
        """
        return state.low, state.high
