"""ProgramError: actor.update: loss reinforce is trained at temperature 1, and the rows were sampled at 0.6.
  at   tests/wrong/61_update_at_another_temperature.py:24   flow.log(step, actor.update(batch, loss=rl.reinforce(), temperature=1.0))
  fix  Leave out temperature=, or write foreign=True if it is meant.

grpo: 1 error, 0 lints
"""

# The policy is trained at another temperature than the one that its rows were sampled at.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8, temperature=0.6))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.reinforce(), temperature=1.0))
