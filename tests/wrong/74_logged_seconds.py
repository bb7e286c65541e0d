"""ProgramError: flow.log: every step has its own 'seconds'.
  at   tests/wrong/74_logged_seconds.py:23   flow.log(step, actor.update(batch, loss=rl.ppo_clip()), seconds=0.5)
  fix  Use another name, such as my_seconds.

train: 1 error, 0 lints
"""

# Every line of metrics has the seconds of its step.
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
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), seconds=0.5)
