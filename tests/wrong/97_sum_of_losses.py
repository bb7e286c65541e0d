"""ProgramError: sft is a loss, and losses are not added or multiplied.
  at   tests/wrong/97_sum_of_losses.py:28   flow.log(step, actor.update(batch, loss=rl.ppo_clip() + 0.1 * rl.sft()))
  fix  Give update one loss: weigh its parts (kl=, entropy=), train other rows along with pretraining=, or write the sum with rl.loss.

grpo: 1 error, 0 lints
"""

# Two losses, added as tensors would be
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
        flow.log(step, actor.update(batch, loss=rl.ppo_clip() + 0.1 * rl.sft()))
