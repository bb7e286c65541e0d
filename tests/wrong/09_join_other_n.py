"""RowsError: a | b takes the same rows on both sides; the left has 4 for each of the rows drawn at line 21, the right has 1 for each of the rows drawn at line 21.
  at   tests/wrong/09_join_other_n.py:24   batch = rl.group_advantages(batch | greedy.select("baseline"))
  fix  Put together what was made from the same rows, with the same n and the same filters.

remax: 1 error, 0 lints
"""

# Two samples of the same prompts, with another number of responses each, do not have the same rows.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("remax")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def remax(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        greedy = reward.score(actor.generate(batch, greedy=True), into={"rewards": "baseline"})
        batch = reward.score(actor.generate(batch, n=4))
        batch = rl.group_advantages(batch | greedy.select("baseline"))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), baseline=batch.baseline.mean())
