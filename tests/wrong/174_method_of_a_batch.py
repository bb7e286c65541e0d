"""ProgramError: a batch has no method 'where'.
  at   tests/wrong/174_method_of_a_batch.py:28   batch = rl.group_advantages(batch.where(batch.rewards > 0.5))
  have concat, count, drop, filter, group_mean, group_std, rename, select, with_columns
  fix  Fields have no parentheses; rows are kept with batch.filter(mask).

grpo: 1 error, 0 lints
"""

# A method of a table, which a batch has not
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
        batch = rl.group_advantages(batch.where(batch.rewards > 0.5))
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, metrics)
