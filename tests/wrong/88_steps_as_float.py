"""ProgramError: flow.steps: steps=1000.0 is not a whole number of at least 0, or None.
  at   tests/wrong/88_steps_as_float.py:25   for step, batch in flow.steps(prompts, steps):
  fix  Write steps=1000.

grpo: 1 error, 0 lints
"""

# A number of steps in scientific notation is a float
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo(steps: float = 1e3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
