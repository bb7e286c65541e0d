"""FieldError: actor.update with loss ppo_clip reads 'advantages', which no op before it adds.
  at   tests/wrong/04_no_advantages.py:25   flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
  have finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rewards, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Add batch = rl.advantages(batch) or batch = rl.group_advantages(batch) before this line.

grpo: 1 error, 0 lints
"""

# The loss wants advantages, and the line that makes them was forgotten.
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
        batch = reward.score(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
