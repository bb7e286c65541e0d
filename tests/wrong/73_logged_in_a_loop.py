"""ProgramError: flow.log: this line is run more than once in a step, and its 'reward' is recorded once.
  at   tests/wrong/73_logged_in_a_loop.py:24   flow.log(step, reward=scored.rewards.mean())
  fix  Log once in a step: gather the numbers in a list first, or give each a name of its own.

train: 1 error, 0 lints
"""

# Each turn of the inner loop takes the place of the one before.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
reward = flow.worker(fl.FunctionReward, lambda prompt, response, answer: float(response == answer))


@flow.program
def train(steps: int = 10, turns: int = 3):
    for step, batch in flow.steps(prompts, steps):
        for _ in range(turns):
            scored = reward.score(actor.generate(batch, n=4))
            flow.log(step, reward=scored.rewards.mean())
        flow.log(step, actor.update(rl.group_advantages(scored), loss=rl.ppo_clip()))
