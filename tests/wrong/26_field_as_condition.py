"""ProgramError: A field has a value for each row, and a condition takes one.
  at   tests/wrong/26_field_as_condition.py:23   if batch.rewards > 0:
  fix  Reduce it first, with .mean(), .sum(), .min() or .max(), or keep rows with batch.filter(...).

grpo: 1 error, 0 lints
"""

# A condition on a field, which has a value for each row.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        if batch.rewards > 0:
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
