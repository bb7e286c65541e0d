"""Episodes of three turns with the actor of ``split_rows_flow``, whose updates leave the weights as they are, and which
answers prompts in between."""

from __future__ import annotations

import split_rows_flow as split

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

STEPS = 3


class Count(fl.Env):
    """Three turns; each is worth its length."""

    turns = 3

    def reset(self, row, seed):
        return 0, "1"

    def step(self, state, action):
        return state + 1, "2", float(len(action)), state == 2


flow = fl.Flow("split_episodes")
actor = flow.worker(split.Struck, split.MODEL, lr=1e-30, max_tokens=12, temperature=1.1, top_k=12)
game = flow.worker(Count)


@flow.program
def split_episodes(steps: int = STEPS):
    for step, batch in flow.steps(arithmetic.prompts(4), steps):
        asked = actor.generate(flow.take(arithmetic.heldout(4, repeat=True)), greedy=True)
        batch = rl.group_advantages(game.rollout(batch, policy=actor, n=2, tokens=24))
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, metrics, length=asked.response_mask.row_sum().mean(), reward=batch.rewards.mean())
