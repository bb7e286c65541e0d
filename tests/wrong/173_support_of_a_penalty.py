"""ProgramError: support=True with repetition_penalty=1.1: the penalty changes how likely tokens are, and the support says only which there are.
  at   tests/wrong/173_support_of_a_penalty.py:22   batch = actor.generate(batch, n=8, support=True)
  fix  Leave out one of the two.

grpo: 1 error, 0 lints
"""

# A repetition penalty changes how likely tokens are, and which ones could be drawn does not say how.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", repetition_penalty=1.1)
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8, support=True)
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
