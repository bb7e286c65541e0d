"""FieldError: ~rewards: ~, & and | are for bool[], and one side is f32[].
  at   tests/wrong/166_field_and_text.py:31   batch = batch.filter(~batch.rewards)
  fix  Compare first, in parentheses: (batch.rewards > 0) & batch.finished.

FieldError: rewards > '0.5': a field f32[] cannot be combined with str '0.5'.
  at   tests/wrong/166_field_and_text.py:32   better = batch.rewards > "0.5"
  fix  Use a number or another field.

ProgramError: actor.update.loss * None: a number cannot be combined with None.
  at   tests/wrong/166_field_and_text.py:34   flow.log(step, metrics, scaled=metrics.loss * None)
  fix  Use another number.

rft: 3 errors, 0 lints
"""

# A field of numbers is combined with a text, and negated as if it were a truth.
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
        batch = batch.filter(~batch.rewards)
        better = batch.rewards > "0.5"
        metrics = actor.update(batch.filter(better), loss=rl.sft())
        flow.log(step, metrics, scaled=metrics.loss * None)
