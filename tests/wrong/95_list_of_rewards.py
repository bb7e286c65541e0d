"""WorkerError: A reward is one function, not a list of exact, brief.
  at   tests/wrong/95_list_of_rewards.py:23   reward = flow.worker(fl.FunctionReward, [exact, brief])
  fix  Declare a worker for each, and add what they give: into={'rewards': 'brevity'} renames it.
"""

# Several reward functions in a list, as TRL takes them
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def brief(response: str) -> float:
    return -0.001 * len(response)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, [exact, brief])


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
