"""ProgramError: actor.generate: top_k=-1 is not a whole number of at least 0.
  at   tests/wrong/83_top_k_minus_one.py:26   batch = reward.score(actor.generate(batch, n=2, top_k=-1))
  fix  Write top_k=0, which takes all tokens.

grpo: 1 error, 0 lints
"""

# -1 switches top-k off in other engines
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
        batch = reward.score(actor.generate(batch, n=2, top_k=-1))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
