"""ProgramError: actor.generate: temperature=0.0 is not a number above 0.
  at   tests/wrong/81_temperature_zero.py:30   best = reward.score(actor.generate(batch.select("prompt", "prompt_ids", "answer"), temperature=0.0))
  fix  Write generate(batch, greedy=True) for the likeliest tokens.

grpo: 1 error, 0 lints
"""

# Greedy decoding as other libraries ask for it
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
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
        if step % 2 == 0:
            best = reward.score(actor.generate(batch.select("prompt", "prompt_ids", "answer"), temperature=0.0))
            flow.log(step, greedy=best.rewards.mean())
