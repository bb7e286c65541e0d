"""FieldError: rl.group_advantages reads 'rewards: f32[]', but 'rewards' has another dtype here: length.score gives i64[].
  at   tests/wrong/07_wrong_dtype.py:31   batch = rl.group_advantages(batch)
  fix  Make length.score give f32[], or read another field.

grpo: 1 error, 0 lints
"""

# A worker of one's own counts in whole numbers what the library reads as f32.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)


class Length(fl.Worker):
    @fl.op(reads="response_ids", adds="rewards: i64[]", cost="local")
    def score(self, batch):
        return {"rewards": batch.response_ids.lengths_column()}


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
length = flow.worker(Length)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        batch = length.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
