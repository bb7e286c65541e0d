"""FieldError: the batch has no field 'reward' here.
  at   tests/wrong/02_field_typo.py:27   flow.log(step, metrics, reward=batch.reward.mean())
  have advantages, finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rewards, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Did you mean 'rewards'?

grpo: 1 error, 0 lints
"""

# The name of a field is misspelt.
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
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip())
        flow.log(step, metrics, reward=batch.reward.mean())
