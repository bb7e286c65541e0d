"""FieldError: rl.group_advantages reads 'rewards', which no op before it adds.
  at   tests/wrong/06_result_thrown_away.py:25   batch = rl.group_advantages(batch)
  have finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Line 24 adds it to the batch that it returns: write batch = reward.score(batch) there, or join the two.

grpo: 1 error, 0 lints
"""

# An op returns a new batch; the one it was given stays as it was.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        reward.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
