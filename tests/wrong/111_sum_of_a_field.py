"""ProgramError: a program does not go through the values of a field.
  at   tests/wrong/111_sum_of_a_field.py:27   mean = sum(batch.rewards) / len(batch)
  fix  Reduce it with .mean(), .sum(), .min() or .max(); or write an op, whose batch has rows.

grpo: 1 error, 0 lints
"""

# Python's own sum, over a field that is not there yet
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
        batch = reward.score(actor.generate(batch, n=2))
        mean = sum(batch.rewards) / len(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=mean)
