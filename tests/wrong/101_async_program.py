"""ProgramError: program 'grpo' is async.
  at   tests/wrong/101_async_program.py:22   async def grpo(steps: int = 3):
  fix  Write def and call ops without await: they return at once, and steps overlap by the plan.
"""

# A program that awaits its ops
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
async def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(await actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
