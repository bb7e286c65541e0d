"""ProgramError: a number has no 'item'.
  at   tests/wrong/119_item.py:29   print("reward", batch.rewards.mean().item())
  fix  It is one number already: use it as it is.

grpo: 1 error, 0 lints
"""

# .item(), as a tensor would have it
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
        print("reward", batch.rewards.mean().item())
        flow.log(step, metrics)
