"""DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO on groups whose rewards differ, with clip-higher and shaped lengths.

Departures: 1. after ``rounds`` draws the step goes on with the groups that it has, where the published code draws
without end or gives up. 2. one optimizer step per step.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("dapo")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1.5e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def dapo(
    steps: int = 400,
    groups: int = 64,
    group_size: int = 8,
    rounds: int = 4,
    clip_high: float = 0.28,
    one_digit: float | None = None,
) -> None:
    for step, prompts in flow.steps(arithmetic.prompts(groups, one_digit=one_digit), steps):
        batch = informative(prompts, group_size)
        for _ in range(rounds - 1):
            if batch.count() >= groups * group_size:  # waits for the rewards
                break
            batch = batch.concat(informative(flow.more(groups), group_size))
        batch = rl.first_groups(batch, groups)
        batch = rl.overlong_penalty(batch, longest=arithmetic.MAX_TOKENS, buffer=4)
        batch = batch.with_columns({"rewards": batch.scores + batch.overlong_penalty})
        batch = rl.advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(clip_high=clip_high))
        flow.log(step, metrics, reward=batch.scores.mean())


def informative(prompts: fl.Batch, group_size: int) -> fl.Batch:
    """The groups whose rewards differ: the others have no gradient."""
    batch = actor.generate(prompts, n=group_size)
    batch = reward.score(batch, into={"rewards": "scores"})
    return batch.filter(batch.group_std("scores") > 0)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
