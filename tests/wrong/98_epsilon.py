"""ProgramError: rl.ppo_clip has no part 'epsilon'.
  at   tests/wrong/98_epsilon.py:29   flow.log(step, actor.update(batch, loss=rl.ppo_clip(epsilon=0.2)))
  have aggregate, anchor, correction, entropy, kl, kl_bound, kl_gradient, kl_kind, kl_weighted, norm, only, ratio
  fix  Write clip=.

grpo: 1 error, 0 lints
"""

# The clip range, as TRL calls it
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
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(epsilon=0.2)))
