"""ProgramError: actor.generate: top_p=95 is not a number above 0 and at most 1.
  at   tests/wrong/82_top_p_in_percent.py:26   batch = reward.score(actor.generate(batch, n=2, top_p=95))
  fix  Give top_p= a number above 0 and at most 1, which takes all tokens.

grpo: 1 error, 0 lints
"""

# top_p is a probability, not a percentage
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
        batch = reward.score(actor.generate(batch, n=2, top_p=95))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
