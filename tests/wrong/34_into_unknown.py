"""FieldError: cost.score adds no 'reward' that into= could rename.
  at   tests/wrong/34_into_unknown.py:25   batch = cost.score(batch, into={"reward": "costs"})
  have rewards
  fix  Did you mean 'rewards'?

safe: 1 error, 0 lints
"""

# A field is renamed that the op does not add.
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
        batch = reward.score(actor.generate(batch, n=8))
        batch = cost.score(batch, into={"reward": "costs"})
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), cost=batch.costs.mean())
