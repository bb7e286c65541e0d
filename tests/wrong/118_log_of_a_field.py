"""ProgramError: flow.log: 'reward' has a value for each row, and a record has one number.
  at   tests/wrong/118_log_of_a_field.py:28   flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards)
  fix  Log a number of it, such as its mean: reward=....mean().

grpo: 1 error, 0 lints
"""

# A field is logged that has a number for each row
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
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards)
