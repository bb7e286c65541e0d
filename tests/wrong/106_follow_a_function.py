"""ProgramError: average.follow: policy=<FunctionReward 'reward'> is not the handle of a worker with a model.
  at   tests/wrong/106_follow_a_function.py:30   average.follow(reward, decay=0.9)
  fix  Give an actor or a critic.

grpo: 1 error, 0 lints
"""

# A worker follows one that has no weights
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
average = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
        average.follow(reward, decay=0.9)
