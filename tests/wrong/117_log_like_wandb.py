"""ProgramError: flow.log takes the step first, and was given dict {'reward': <number rewards.mean()>, 'loss': <number act.
  at   tests/wrong/117_log_like_wandb.py:29   flow.log({"reward": batch.rewards.mean(), "loss": metrics.loss}, step=step)
  fix  Write flow.log(step, ...).

grpo: 1 error, 0 lints
"""

# A dict of numbers is logged, as wandb takes it
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
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log({"reward": batch.rewards.mean(), "loss": metrics.loss}, step=step)
