"""DataError: the list of rows has no rows.
  at   tests/wrong/116_no_rows.py:13   prompts = fl.data.rows([row for row in sums if row["level"] > 3], batch=1)
  fix  Give it rows.

grpo: 1 error, 0 lints
"""

# A data set that a filter has left empty
import flowrl as fl
from flowrl import rl

sums = [{"prompt": "1+2=", "answer": "3", "level": 1}]
prompts = fl.data.rows([row for row in sums if row["level"] > 3], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
