"""ProgramError: actor.update takes a batch, and was given metrics.
  at   tests/wrong/30_metrics_as_batch.py:26   flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
  fix  Give the batch; an update gives metrics.

ppo: 1 error, 0 lints
"""

# Metrics are taken for the batch.
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
        batch = critic.update(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
