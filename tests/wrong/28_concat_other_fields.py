"""FieldError: concat takes batches with the same fields; there is 'rewards' only on the left.
  at   tests/wrong/28_concat_other_fields.py:23   batch = batch.concat(actor.generate(flow.more(1)))
  fix  Give both the same fields, or write .drop('rewards') on the left.

rft: 1 error, 0 lints
"""

# Rows that were scored and rows that were not have different fields.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("rft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def rft(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch))
        batch = batch.concat(actor.generate(flow.more(1)))
        flow.log(step, actor.update(batch, loss=rl.sft()))
