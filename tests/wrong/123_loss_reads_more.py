"""FieldError: loss weighted reads 'rewards', which its reads= does not name.
  at   tests/wrong/123_loss_reads_more.py:25   return -x["rewards"] * x["advantages"] * x.predicted
  have advantages, response_mask
  fix  Write reads="advantages, response_mask, rewards".
"""

# A loss of one's own reads a field that it does not declare
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@rl.loss(reads="advantages, response_mask")
def weighted(x):
    return -x["rewards"] * x["advantages"] * x.predicted


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=weighted()))
