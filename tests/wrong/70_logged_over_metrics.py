"""ProgramError: flow.log: a step has two numbers called 'loss': of actor.update (line 24), and the keyword loss= (line 24).
  at   tests/wrong/70_logged_over_metrics.py:24   flow.log(step, metrics, loss=0.0, reward=batch.rewards.mean())
  fix  Name the metrics, flow.log(step, actor=metrics), or use another keyword.

train: 1 error, 0 lints
"""

# A number that is logged under the name of a metric would take its place.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
reward = flow.worker(fl.FunctionReward, lambda prompt, response, answer: float(response == answer))


@flow.program
def train(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, metrics, loss=0.0, reward=batch.rewards.mean())
