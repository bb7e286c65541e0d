"""ProgramError: rl.gae: gamma=1.5 is not a number from 0 to 1.
  at   tests/wrong/90_gamma_above_one.py:28   batch = rl.gae(batch, gamma=1.5, lam=0.95)
  fix  Give gamma= a number from 0 to 1.

ppo: 1 error, 0 lints
"""

# A discount above one makes returns grow with every token
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("ppo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
critic = flow.worker(fl.Critic, model="Qwen/Qwen3-0.6B", lr=1e-5)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def ppo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = critic.values(reward.score(actor.generate(batch)))
        batch = rl.gae(batch, gamma=1.5, lam=0.95)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), critic.update(batch))
