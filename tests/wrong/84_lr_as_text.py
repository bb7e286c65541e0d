"""WorkerError: Actor: lr='1e-6' is not a number of at least 0, or None.
  at   tests/wrong/84_lr_as_text.py:19   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=settings["lr"])
  fix  Write lr=1e-06.
"""

# A learning rate that came out of a YAML file as text
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

settings = {"lr": "1e-6"}

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=settings["lr"])
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
