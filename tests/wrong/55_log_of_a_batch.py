"""ProgramError: flow.log: 'rewards' is a batch.
  at   tests/wrong/55_log_of_a_batch.py:22   flow.log(step, rewards=batch)
  fix  Log a number of it: rewards=batch.rewards.mean().

evaluate: 1 error, 0 lints
"""

# A whole batch is logged.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("evaluate")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def evaluate(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch))
        flow.log(step, rewards=batch)
