"""FieldError: a | b: 'rewards' is written twice, by reward.score and cost.score.
  at   tests/wrong/12_two_rewards_joined.py:24   batch = reward.score(batch) | cost.score(batch)
  fix  Rename one: into={'rewards': 'other_rewards'} where it is added, or .rename(rewards='other_rewards').

safe: 1 error, 0 lints
"""

# A reward and a cost, joined before one of them has been renamed.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("safe")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/helpful")
cost = flow.worker(fl.RewardModel, model="runs/harmful")


@flow.program
def safe(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        batch = reward.score(batch) | cost.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
