"""ProgramError: actor.generate is an op and has no 'remote'.
  at   tests/wrong/102_remote.py:26   batch = reward.score(actor.generate.remote(batch, n=2))
  fix  Call it: actor.generate(...).

grpo: 1 error, 0 lints
"""

# An op called as Ray calls the methods of its actors
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate.remote(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
