"""RowsError: concat puts rows with other keys below each other; two of these are 4 for each of the rows drawn at line 24, whose keys are the same.
  at   tests/wrong/167_concat_of_the_same_rows.py:27   batch = rl.group_advantages(reward.score(cold.concat(warm)))
  fix  Sample them together, with n= of all; or join fields of the same rows with a | b.

grpo: 1 error, 0 lints
"""

# Two samples of the same prompts are put below each other
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
        cold = actor.generate(batch, n=4, temperature=0.7)
        warm = actor.generate(batch, n=4, temperature=1.2)
        batch = rl.group_advantages(reward.score(cold.concat(warm)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
