"""ProgramError: what an update reports has no method 'items'.
  at   tests/wrong/175_metrics_items.py:29   flow.log(step, **dict(metrics.items()))
  fix  An entry is an attribute, metrics.loss; flow.log(step, metrics) logs all of them.

grpo: 1 error, 0 lints
"""

# Metrics are gone through as if they were a dict
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
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, **dict(metrics.items()))
