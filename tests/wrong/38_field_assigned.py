"""ProgramError: a batch never changes: 'advantages' cannot be assigned.
  at   tests/wrong/38_field_assigned.py:23   batch.advantages = batch.rewards - 0.5
  fix  Write batch = batch.with_columns({"advantages": ...}).

reinforce: 1 error, 0 lints
"""

# A field is assigned to a batch, which never changes.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("reinforce")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def reinforce(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch))
        batch.advantages = batch.rewards - 0.5
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
