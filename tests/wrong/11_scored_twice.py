"""FieldError: brief.score adds 'rewards', which the batch already has.
  at   tests/wrong/11_scored_twice.py:34   batch = brief.score(batch)
  fix  Give it another name: into={'rewards': 'other_rewards'}.

grpo: 1 error, 0 lints
"""

# Two rewards in a row write the same field.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def short(response: str) -> float:
    return -len(response) / 100


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
correct = flow.worker(fl.FunctionReward, exact)
brief = flow.worker(fl.FunctionReward, short)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        batch = correct.score(batch)
        batch = brief.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
