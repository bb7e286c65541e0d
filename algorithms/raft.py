"""RAFT (Dong et al. 2023, arXiv:2304.06767): supervised training on the best of several answers of one's own.

Departures: 1. sampling and training alternate every step, not over large rounds. 2. answers that earn nothing are left
out, also where they are the best of their prompt.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("raft")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def raft(steps: int = 300, prompts_per_step: int = 64, samples: int = 8, one_digit: float | None = None) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch, n=samples)
        batch = reward.score(batch)
        best = rl.best_of(batch)
        best = best.filter(best.rewards > 0)
        metrics = actor.update(best, loss=rl.sft())
        flow.log(step, metrics, reward=batch.rewards.mean(), best=best.count())


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
