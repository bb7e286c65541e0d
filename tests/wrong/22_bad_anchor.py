"""ProgramError: rl.ppo_clip: anchor='rolout' is none of rollout, sampling, old, loglinear.
  at   tests/wrong/22_bad_anchor.py:24   flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="rolout")))
  fix  Write anchor="rollout".

grpo: 1 error, 0 lints
"""

# The anchor of a loss is misspelt.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="rolout")))
