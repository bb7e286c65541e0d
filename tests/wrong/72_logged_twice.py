"""ProgramError: flow.log: a step has two numbers called 'loss': of critic.update (line 24), and of actor.update (line 25).
  at   tests/wrong/72_logged_twice.py:25   flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
  fix  Name the metrics, flow.log(step, actor=metrics), or use another keyword.

train: 1 error, 0 lints
"""

# Two calls of flow.log in a step, each with metrics of its own: the second loss takes the place of the first.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
critic = flow.worker(fl.Critic, model="Qwen/Qwen3-0.6B", lr=1e-5)
reward = flow.worker(fl.FunctionReward, lambda prompt, response, answer: float(response == answer))


@flow.program
def train(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.gae(critic.values(reward.score(actor.generate(batch, n=4))))
        flow.log(step, critic.update(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
