"""FieldError: rl.group_advantages reads 'rewards: f32[]', but 'rewards' has other dims here: process.score gives f32[*response].
  at   tests/wrong/08_wrong_dims.py:31   batch = rl.group_advantages(batch)
  fix  Make process.score give f32[], or read another field.

grpo: 1 error, 0 lints
"""

# Rewards for each token, given to an op that wants one for each row.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)


class Process(fl.Worker):
    @fl.op(reads="response_mask", adds="rewards: f32[*response]", cost="local")
    def score(self, batch):
        return {"rewards": batch.response_mask * 1.0}


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
process = flow.worker(Process)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        batch = process.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
