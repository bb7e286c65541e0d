"""RowsError: a | b takes the same rows on both sides; the left has what line 25 kept of 8 for each of the rows drawn at line 22, the right has 8 for each of the rows drawn at line 22.
  at   tests/wrong/10_join_filtered.py:26   batch = kept | ref.logprobs(batch)
  fix  Put them together first, then filter.

grpo: 1 error, 0 lints
"""

# The log-probabilities of all rows are joined with the rows that a filter kept.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        scored = reward.score(batch)
        kept = scored.filter(scored.group_std("rewards") > 0)
        batch = kept | ref.logprobs(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=1e-3)))
