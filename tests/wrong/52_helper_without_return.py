"""ProgramError: actor.update takes a batch, and was given None.
  at   tests/wrong/52_helper_without_return.py:28   flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
  fix  Give the batch; a function that makes one must return it.

grpo: 1 error, 0 lints
"""

# A function of one's own that forgets to give back what it made.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


def scored(batch):
    batch = reward.score(batch)
    batch = rl.group_advantages(batch)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = scored(actor.generate(batch, n=8))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
