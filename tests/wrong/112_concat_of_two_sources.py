"""FieldError: concat takes batches with the same fields; there is 'answer' only on the left and 'level', 'solution' only on the right.
  at   tests/wrong/112_concat_of_two_sources.py:28   batch = batch.concat(flow.take(words))
  fix  Give both the same fields, or write .drop('answer') on the left and .drop('level', 'solution') on the right.

grpo: 1 error, 0 lints
"""

# Rows of two data sets with different columns
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

words = fl.data.rows([{"prompt": "a+b=", "solution": "ab", "level": "1"}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = batch.concat(flow.take(words))
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
