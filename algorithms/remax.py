"""ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE whose baseline is the reward of the greedy answer; no critic.

Departures: 1. the KL to the reference is a penalty on the tokens that follow as well, in the return of each, where the
published code adds it up over the row. 2. a mean over tokens, not over rows. 3. the clipped loss stands for
``-A log p``: at the one optimizer step of a step they have the same gradient, save where engine and trainer disagree.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("remax")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1.5e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def remax(steps: int = 400, prompts_per_step: int = 256, kl: float = 1e-3, one_digit: float | None = None) -> None:
    for step, prompts in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        greedy = reward.score(actor.generate(prompts, greedy=True), into={"rewards": "greedy_rewards"})
        batch = actor.generate(prompts)
        batch = reward.score(batch) | ref.logprobs(batch) | greedy.select("greedy_rewards")
        batch = rl.kl_penalty(batch, coef=kl)
        batch = rl.advantages(batch, of="returns", baseline="greedy_rewards", center="none", scale="none")
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, metrics, reward=batch.rewards.mean())


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
