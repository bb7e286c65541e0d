"""ProgramError: a batch is not sliced or indexed by rows in a program.
  at   tests/wrong/110_slice_of_a_batch.py:28   flow.log(step, actor.update(batch[:8], loss=rl.ppo_clip()))
  fix  Keep rows with batch.filter(mask) or rl.first_groups(batch, n), or change batch= of the source.

grpo: 1 error, 0 lints
"""

# A batch is sliced like a list
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
        flow.log(step, actor.update(batch[:8], loss=rl.ppo_clip()))
