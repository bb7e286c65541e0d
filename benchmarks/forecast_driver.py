"""The program that ``forecast.py`` runs and predicts: GRPO on a small model whose responses are as long as is asked.

    flowrl run benchmarks/forecast_driver.py --plan PLAN --runtime ray --prompts 8 --tokens 64 --out DIR

No token ends a response, so that each has ``tokens`` of them; with ``--ends N`` any of N letters ends it, so that
lengths vary, as the run that is calibrated by needs it.
"""

from __future__ import annotations

from typing import Any

import flowrl as fl
from flowrl import rl

LETTERS = [chr(number) for number in range(33, 33 + 94)]
PROMPT = 24  # letters


def build_tokenizer() -> Any:
    """One token per letter, and none that ends a sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<any>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<any>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")


#: A Qwen2 of 4.8 million parameters with random weights.
MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 2 + len(LETTERS),
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


def prompts(batch: int) -> Any:
    """Prompts of one length, some more than a step has."""
    words = ("".join(LETTERS[(7 * row + 3 * place) % 94] for place in range(PROMPT)) for row in range(4 * batch))
    return fl.data.rows([{"prompt": word} for word in words], batch=batch)


def share_of_digits(prompt: str, response: str) -> float:
    """A reward that differs between responses."""
    return sum(letter.isdigit() for letter in response) / max(1, len(response))


flow = fl.Flow("forecast")
actor = flow.worker(fl.Actor, MODEL, lr=1e-5, max_tokens=256)
reward = flow.worker(fl.FunctionReward, share_of_digits)


@flow.program
def forecast(
    steps: int = 8, prompts_per_step: int = 8, n: int = 4, tokens: int = 64, ends: int = 0, sizes: int = 1
) -> None:
    for step, batch in flow.steps(prompts(prompts_per_step), steps):
        rows, longest = n * (1 + step % sizes), tokens * (1 + step // sizes % sizes)
        batch = actor.generate(batch, n=rows, max_tokens=longest, stop=tuple(range(2, 2 + ends)))
        batch = reward.score(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, metrics, reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
