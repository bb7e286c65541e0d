"""ProgramError: program 'grpo' is a generator: it yields.
  at   tests/wrong/130_generator_program.py:22   def grpo(steps: int = 3):
  fix  Record what it yields with flow.log(step, ...).
"""

# A program that yields its metrics
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
        yield step, actor.update(batch, loss=rl.ppo_clip())
