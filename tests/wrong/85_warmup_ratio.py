"""WorkerError: Actor: warmup=0.1 is not a whole number of at least 0.
  at   tests/wrong/85_warmup_ratio.py:17   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6, schedule="cosine", warmup=0.1, total=100)
  fix  Give warmup= the number of optimizer steps, not a share of them.
"""

# A share of the steps, where a number of steps is meant
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6, schedule="cosine", warmup=0.1, total=100)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
