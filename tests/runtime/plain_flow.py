"""A program without a reference, whose rows a witness keeps: for engines that only sample and update."""

from __future__ import annotations

from overlap_flow import GROUP, MODEL, PROMPTS, Witness, arithmetic, length

import flowrl as fl
from flowrl import rl

__all__ = ["GROUP", "PROMPTS", "Witness"]

flow = fl.Flow("overlap")
actor = flow.worker(fl.Actor, MODEL, lr=3e-3, max_tokens=12)
reward = flow.worker(fl.FunctionReward, length)
witness = flow.worker(Witness)


@flow.program
def overlap(steps: int = 4):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        rows = rl.group_advantages(reward.score(actor.generate(batch, n=GROUP)))
        witness.see(rows, step=step)
        flow.log(step, actor.update(rows, loss=rl.ppo_clip()))
