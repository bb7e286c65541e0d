"""FieldError: reward.score reads 'response_ids', which no op before it adds.
  at   tests/wrong/01_no_generate.py:28   batch = reward.score(batch)
  have answer, prompt, prompt_ids
  fix  Add batch = actor.generate(batch) before this line.

grpo: 1 error, 0 lints
"""

# Responses are scored before anything has generated them.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(batch)
        batch = actor.generate(batch, n=8)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
