"""ProgramError: This actor is not trained: it has no lr.
  at   tests/wrong/160_frozen_actor_updated.py:24   flow.log(step, verifier.update(batch, loss=rl.ppo_clip()))
  fix  Declare it with lr=1e-5 or another.

grpo: 1 error, 0 lints
"""

# An update of an actor that was declared frozen: the wrong one of two was meant.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
verifier = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=None)
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = verifier.generate(batch, n=8)
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, verifier.update(batch, loss=rl.ppo_clip()))
