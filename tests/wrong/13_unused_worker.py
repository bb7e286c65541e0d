"""WorkerError: worker 'ref' (Reference) is never used by a program of this flow.
  at   tests/wrong/13_unused_worker.py:16   ref = flow.worker(fl.Reference, of=actor)
  fix  Call one of its ops, or take the worker out.

grpo: 1 error, 0 lints
"""

# A reference that no program calls would hold a model's memory for nothing.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        batch = reward.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
