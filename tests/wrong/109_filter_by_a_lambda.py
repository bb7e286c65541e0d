"""ProgramError: filter takes a bool field of the batch.
  at   tests/wrong/109_filter_by_a_lambda.py:27   batch = batch.filter(lambda row: row["rewards"] > 0)
  fix  Write batch.filter(batch.rewards > 0).

grpo: 1 error, 0 lints
"""

# A filter by a function of a row, as Hugging Face data sets have it
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
        batch = batch.filter(lambda row: row["rewards"] > 0)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
