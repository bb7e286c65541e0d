"""Two actors that are trained and sampled from side by side, each on its own rows, on a model that is so small that whole
runs compare bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

MODEL = fl.Model(
    config={
        **arithmetic.MODEL.config,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    tokenizer=arithmetic.build_tokenizer,
)


def digits(prompt: str, response: str) -> float:
    """A reward with something to learn from the first token on."""
    return sum(c in "13579" for c in response) - 0.1 * len(response)


flow = fl.Flow("two_actors")
first = flow.worker(fl.Actor, MODEL, lr=3e-3, max_tokens=5)
second = flow.worker(fl.Actor, MODEL, lr=1e-2, max_tokens=8, seed=1)
reward = flow.worker(fl.FunctionReward, digits)


@flow.program
def two_actors(steps: int = 6):
    for step, batch in flow.steps(arithmetic.prompts(3), steps):
        for actor in (first, second):
            rows = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            if actor is first or step % 2:  # the versions of the two part
                flow.log(step, **{actor.name: actor.update(rows, loss=rl.ppo_clip())})
