"""A program whose actor does one thing otherwise while it generates, on whatever rank and engine it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from letters import model_of

import flowrl as fl
from flowrl import rl
from flowrl.batch import Column

#: For whose heads vLLM has kernels.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,  # far from uniform, so that a wrong place shows
    "bos_token_id": 7,
}
PROMPTS = [{"prompt": "ab"}, {"prompt": "cdefabc"}, {"prompt": "fbad"}]
#: Which of the faults below the engine has.
FAULT = ""


def hot(engine: Any, sound: Callable[..., Any]) -> Callable[..., Any]:
    """It samples at 1.3, and says that it was the temperature that was asked for."""

    def generate(prompts, n, seeds, sampling, starts=None):
        made = sound(prompts, n, seeds, replace(sampling, temperature=1.3), starts)
        return replace(made, temperature=sampling.row_temperature)

    return generate


def begin(engine: Any, sound: Callable[..., Any]) -> Callable[..., Any]:
    """It begins each prompt with a token more."""

    def generate(prompts, *said):
        return sound(Column.of([[7, *prompt] for prompt in prompts.to_list()], dim="prompt", dtype="i32"), *said)

    return generate


def processed(engine: Any, sound: Callable[..., Any]) -> Callable[..., Any]:
    """Its log-probabilities are those of what was sampled from."""

    def generate(*said):
        made = sound(*said)
        return replace(made, rollout_logprobs=made.sampling_logprobs)

    return generate


def stale(engine: Any, sound: Callable[..., Any]) -> Callable[..., Any]:
    """It has the weights of the call before."""
    history: list[dict[str, Any]] = []

    def generate(*said):
        held = dict(engine.net.model.named_parameters())
        now = {name: weight.data for name, weight in held.items()}
        history.append({name: data.clone() for name, data in now.items()})
        for name, weight in held.items():
            weight.data = history[max(0, len(history) - 2)][name]
        made = sound(*said)
        for name, weight in held.items():
            weight.data = now[name]
        return made

    return generate


FAULTS = {"hot": hot, "begin": begin, "processed": processed, "stale": stale}


class Faulty(fl.Actor):
    def open(self, opening) -> None:
        super().open(opening)
        if FAULT and (sound := getattr(self.engine, "generate", None)) is not None:
            self.engine.generate = FAULTS[FAULT](self.engine, sound)


def digits(response: str) -> float:
    return float(len(set(response)) % 3)


def make_flow(**said: Any) -> fl.Flow:
    flow = fl.Flow("ranks")
    actor = flow.worker(Faulty, model_of(**SIZES), name="actor", lr=3e-3, max_tokens=7, **said)
    reward = flow.worker(fl.FunctionReward, digits, name="reward")

    @flow.program
    def ranks(steps: int = 4):
        for step, rows in flow.steps(fl.data.rows(PROMPTS, batch=3), steps):
            batch = rl.group_advantages(reward.score(actor.generate(rows, n=4)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    return flow
