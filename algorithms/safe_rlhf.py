"""Safe RLHF (Dai et al. 2023, arXiv:2310.12773): PPO under a constraint on a cost, with a Lagrange multiplier.

The advantage is ``(A_reward - m A_cost) / (1 + m)``, as in the published code; ``m`` grows while the mean cost is
above ``limit``, and is carried from step to step. Rows of supervised data are trained along, so that less is forgotten.

Departures: 1. the multiplier follows the mean cost of the step, not a moving average. 2. the KL penalty is paid from
the reward alone.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("safe_rlhf")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-4, max_tokens=arithmetic.MAX_TOKENS)
critic = flow.worker(fl.Critic, arithmetic.MODEL, lr=3e-4)
cost_critic = flow.worker(fl.Critic, arithmetic.MODEL, lr=3e-4)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)
cost = flow.worker(fl.FunctionReward, arithmetic.says_one)  # or fl.RewardModel, a cost model


@flow.program
def safe_rlhf(
    steps: int = 300,
    prompts_per_step: int = 128,
    kl: float = 1e-3,
    limit: float = 0.3,
    rate: float = 0.5,
    ptx: float = 0.05,
    one_digit: float | None = None,
) -> None:
    multiplier = 1.0
    pretraining = arithmetic.examples(32)
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch)
        costs = cost.score(batch) | cost_critic.values(batch)
        costs = rl.gae(costs)
        batch = reward.score(batch) | ref.logprobs(batch) | critic.values(batch)
        batch = rl.kl_penalty(batch, coef=kl)
        batch = rl.gae(batch, into={"advantages": "reward_advantages"})
        multiplier = rl.lagrange(multiplier, costs.rewards.mean(), limit=limit, rate=rate)
        both = batch | costs.select("advantages").rename(advantages="cost_advantages")
        mixed = (both.reward_advantages - both.cost_advantages * multiplier) / (multiplier + 1)
        batch = both.with_columns({"advantages": mixed})
        critic_metrics = critic.update(batch)
        cost_metrics = cost_critic.update(costs)
        metrics = actor.update(batch, loss=rl.ppo_clip(), pretraining=flow.take(pretraining), pretraining_weight=ptx)
        told = {"reward": batch.rewards.mean(), "cost": costs.rewards.mean(), "multiplier": multiplier}
        flow.log(step, metrics, critic_metrics, cost_metrics, **told)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
