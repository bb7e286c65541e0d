"""ProgramError: this loop has no end: the source begins again when it has ended, and no number of steps is given.
  at   tests/wrong/115_without_an_end.py:25   for step, batch in flow.steps(prompts):
  fix  Give flow.steps(source, steps) a number, or the source repeat=False.

grpo: 1 error, 0 lints
"""

# The source begins again and again, and nobody says how many steps there are
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo():
    for step, batch in flow.steps(prompts):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
