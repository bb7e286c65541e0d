"""ProgramError: actor.generate: n=0 is not a whole number of at least 1.
  at   tests/wrong/80_no_samples.py:26   batch = reward.score(actor.generate(batch, n=group_size))
  fix  Give n= 1 or more.

grpo: 1 error, 0 lints
"""

# A group of no responses: n counts from 1
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo(steps: int = 3, group_size: int = 0):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=group_size))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())
