"""ProgramError: actor.to is not there; the ops of Actor are ask, entropies, follow, generate, logprobs, save, update.
  at   tests/wrong/108_to_cuda.py:25   actor.to("cuda")
  fix  Where a worker runs is said by a plan, --plan FILE: leave it out.

grpo: 1 error, 0 lints
"""

# A handle is moved to a device as a module would be
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
    actor.to("cuda")
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
