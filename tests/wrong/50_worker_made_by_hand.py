"""WorkerError: FunctionReward.score: a worker made by hand was called inside a program.
  at   tests/wrong/50_worker_made_by_hand.py:27   batch = reward.score(actor.generate(batch, n=8))
  fix  Declare it with flow.worker(FunctionReward, ...).

grpo: 1 error, 0 lints
"""

# A worker made by hand is used in a program.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = fl.FunctionReward(exact)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
