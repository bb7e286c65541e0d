"""ProgramError: actor.update: epochs=0 is not a whole number of at least 1.
  at   tests/wrong/87_epochs_zero.py:28   metrics = actor.update(batch, loss=rl.ppo_clip(), epochs=0)
  fix  Give epochs= 1 or more.

grpo: 1 error, 0 lints
"""

# No epoch at all: the update would change nothing
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(), epochs=0)
        flow.log(step, metrics)
