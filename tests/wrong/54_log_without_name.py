"""ProgramError: flow.log takes metrics and named numbers, and was given a number.
  at   tests/wrong/54_log_without_name.py:22   flow.log(step, batch.rewards.mean())
  fix  Give it a name: flow.log(step, name=...).

evaluate: 1 error, 0 lints
"""

# A number is logged without a name.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("evaluate")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def evaluate(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch))
        flow.log(step, batch.rewards.mean())
