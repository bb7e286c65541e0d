"""GRPO on a tiny model whose rewards take their time, so that ranks can come and go between its steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

SMALL = {**arithmetic.MODEL.config, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2}  # fmt: skip


def slow(prompt: str, response: str) -> float:
    """A reward after a while."""
    time.sleep(0.1)
    return sum(c in "13579" for c in response) - 0.1 * len(response)


flow = fl.Flow("paced")
actor = flow.worker(fl.Actor, fl.Model(config=SMALL, tokenizer=arithmetic.build_tokenizer), lr=1e-4, max_tokens=5)
reward = flow.worker(fl.FunctionReward, slow)


@flow.program
def paced(steps: int = 100):
    for step, batch in flow.steps(arithmetic.prompts(4), steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=3)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())
