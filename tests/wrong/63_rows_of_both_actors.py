"""ProgramError: actor.update: loss ppo_clip is one of the policy that sampled the rows, and these were sampled by teacher.
  at   tests/wrong/63_rows_of_both_actors.py:25   flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
  fix  Sample them with actor, or write foreign=True if they are meant. Losses that ask not who sampled, such as rl.sft(), need no word.

grpo: 1 error, 0 lints
"""

# Rows of a teacher are put to those of the policy, and trained on as its own.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
teacher = flow.worker(fl.Actor, model="Qwen/Qwen3-8B", lr=None)
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8).concat(teacher.generate(flow.more(4), n=8))
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
