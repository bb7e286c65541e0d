"""FieldError: filter takes one bool per row, and was given f32[].
  at   tests/wrong/27_filter_by_numbers.py:23   batch = batch.filter(batch.rewards)
  fix  Compare a number per row: batch.filter(batch.rewards > 0).

rft: 1 error, 0 lints
"""

# A filter by numbers, not by a truth for each row.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("rft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def rft(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = batch.filter(batch.rewards)
        flow.log(step, actor.update(batch, loss=rl.sft()))
