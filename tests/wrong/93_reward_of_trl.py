"""FieldError: brevity takes 'completions', which is no column of the batch: a reward is fn(prompt, response, **columns) -> float.
  at   tests/wrong/93_reward_of_trl.py:16   def brevity(completions, **kwargs):
  have answer, prompt, response
  fix  Write response for completions: it is called once for each row, or with lists where FunctionReward has batched=True.

grpo: 1 error, 0 lints
"""

# A reward function as TRL wants it: lists of completions, and everything else in kwargs
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def brevity(completions, **kwargs):
    return [-float(len(text)) for text in completions]


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, brevity)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
