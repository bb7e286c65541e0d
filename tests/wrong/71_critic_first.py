"""ProgramError: flow.log: 'loss' is of actor.update (line 28) in some steps, and of critic.update (line 26) in others.
  at   tests/wrong/71_critic_first.py:26   flow.log(step, critic.update(batch))
  fix  Name the metrics, flow.log(step, critic=metrics), or use another keyword.

train: 1 error, 0 lints
"""

# The loss of the critic becomes that of the actor once the warm-up is over.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
critic = flow.worker(fl.Critic, model="Qwen/Qwen3-0.6B", lr=1e-5)
reward = flow.worker(fl.FunctionReward, lambda prompt, response, answer: float(response == answer))


@flow.program
def train(steps: int = 10, warmup: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = critic.values(reward.score(actor.generate(batch, n=4)))
        batch = rl.gae(batch)
        if step < warmup:
            flow.log(step, critic.update(batch))
        else:
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
            flow.log(step, critic=critic.update(batch))
