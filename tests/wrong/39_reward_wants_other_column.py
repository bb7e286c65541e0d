"""FieldError: exact takes 'answers', which is no column of the batch: a reward is fn(prompt, response, **columns) -> float.
  at   tests/wrong/39_reward_wants_other_column.py:16   def exact(response: str, answers: str) -> float:
  have answer, prompt, response
  fix  Write answer for answers.

grpo: 1 error, 0 lints
"""

# A reward function names a column that the data does not have.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answers: str) -> float:
    return float(response == answers)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
