"""ProgramError: loss value_clip is one of values; this update trains logprobs.
  at   tests/wrong/41_value_loss_for_actor.py:25   flow.log(step, actor.update(batch, loss=rl.value_clip()), critic.update(batch))
  fix  Give it to the update of a critic.

ppo: 1 error, 0 lints
"""

# A loss on a critic's values, given to an actor.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("ppo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
critic = flow.worker(fl.Critic, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def ppo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch)
        batch = rl.gae(reward.score(batch) | critic.values(batch))
        flow.log(step, actor.update(batch, loss=rl.value_clip()), critic.update(batch))
