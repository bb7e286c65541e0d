"""ProgramError: a source is not iterated over: rows are drawn by steps.
  at   tests/wrong/100_loop_over_the_source.py:25   for step, batch in enumerate(prompts):
  fix  Write for step, batch in flow.steps(source, steps).

grpo: 1 error, 0 lints
"""

# A source is no data loader
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
    for step, batch in enumerate(prompts):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
