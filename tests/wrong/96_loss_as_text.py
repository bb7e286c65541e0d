"""ProgramError: actor.update: loss= takes a loss, and was given str 'ppo_clip'.
  at   tests/wrong/96_loss_as_text.py:28   flow.log(step, actor.update(batch, loss=loss))
  fix  Give what rl.ppo_clip(), rl.sft() or a loss of your own gives.

grpo: 1 error, 0 lints
"""

# A loss chosen by its name, as a configuration file would
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo(steps: int = 3, loss: str = "ppo_clip"):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=loss))
