"""GRPO and PPO learn: from random weights to saying the last letter shown twice, within seconds."""

from __future__ import annotations

import json
import random

import pytest

import flowrl as fl
from flowrl import rl

pytestmark = pytest.mark.usefixtures("one_thread")

CHARS = "abcdef;"
QUIET = ("kl", "ref_kl", "reward", "ratio_max", "response_truncated")  # of which a run that learns is not told


def build_tokenizer():
    """A token per character; ``;`` ends a sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<pad>", *CHARS])}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")


MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1 + CHARS.index(";"),
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


def prompts(batch: int):
    """Three letters; never "aaa" to "fff", which are kept to see whether the rule was learned."""

    def draw(index: int) -> dict[str, str]:
        chance = random.Random(f"letters {index}")
        while True:
            text = "".join(chance.choice("abcdef") for _ in range(3))
            if len(set(text)) > 1:
                return {"prompt": text}

    return fl.data.generated(draw, batch=batch)


def heldout():
    return fl.data.rows([{"prompt": 3 * letter} for letter in "abcdef"], batch=6, shuffle=False, repeat=False)


def last_letter_twice(prompt: str, response: str) -> float:
    """Half for each of two letters that is the last one shown."""
    return response.count(prompt[-1]) / 2


def make_flow(algorithm: str):
    """The flow of a driver, on this task."""
    flow = fl.Flow(algorithm)
    actor = flow.worker(fl.Actor, MODEL, lr=3e-3, max_tokens=2, name="actor")
    reward = flow.worker(fl.FunctionReward, last_letter_twice, name="reward")
    if algorithm == "grpo":

        @flow.program
        def grpo(steps: int = 80):
            for step, batch in flow.steps(prompts(16), steps):
                batch = actor.generate(batch, n=8)
                batch = reward.score(batch)
                batch = rl.group_advantages(batch)
                metrics = actor.update(batch, loss=rl.ppo_clip())
                flow.log(step, metrics, reward=batch.rewards.mean())
    else:
        critic = flow.worker(fl.Critic, MODEL, lr=3e-3, name="critic")
        ref = flow.worker(fl.Reference, of=actor, name="ref")

        @flow.program
        def ppo(steps: int = 40):
            for step, batch in flow.steps(prompts(128), steps):
                batch = actor.generate(batch)
                batch = reward.score(batch) | ref.logprobs(batch) | critic.values(batch)
                batch = rl.kl_penalty(batch, coef=1e-3)
                batch = rl.gae(batch)
                critic.update(batch)
                metrics = actor.update(batch, loss=rl.ppo_clip(), epochs=2)
                flow.log(step, metrics, reward=batch.rewards.mean())

    @flow.program
    def evaluate():
        for step, batch in flow.steps(heldout()):
            batch = actor.generate(batch, greedy=True)
            batch = reward.score(batch)
            flow.log(step, reward=batch.rewards.mean())

    return flow


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_reward_rises(algorithm, tmp_path):
    outcome = make_flow(algorithm).run(algorithm, "evaluate", out=tmp_path, quiet=True, save_models=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["program"] == algorithm]
    before, after = sum(rewards[:5]) / 5, sum(rewards[-10:]) / 10
    assert before < 0.3 and after > 0.9, f"{before:.2f} -> {after:.2f}"
    assert outcome.last[-1][1]["reward"] > 0.9, "greedy, on prompts that were never shown"
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    about = {(event["kind"], (event["text"].partition(", ")[2].split() or [""])[0]) for event in told}
    about -= {("hint", "ref_kl")}  # it is far from its random weights, as it should be
    assert not {kind for kind, name in about if name in QUIET or kind == "gap"}, about
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
