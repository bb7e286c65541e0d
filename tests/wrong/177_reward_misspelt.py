"""FieldError: grade takes 'respnse' and 'answr', which are no columns of the batch: a reward is fn(prompt, response, **columns) -> float.
  at   tests/wrong/177_reward_misspelt.py:16   def grade(respnse: str, answr: str) -> float:
  have answer, prompt, response
  fix  Write response for respnse. Write answer for answr.

grpo: 1 error, 0 lints
"""

# The parameters of a reward function are misspelt
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def grade(respnse: str, answr: str) -> float:
    return float(respnse == answr)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, grade)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
