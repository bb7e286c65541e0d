"""FieldError: actor.update with loss ppo_clip compares log-probabilities of different kinds: 'rollout_logprobs' at temperature 0.6, 'ref_logprobs' at temperature 1.
  at   tests/wrong/60_reference_at_another_temperature.py:25   flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.001)))
  fix  Leave out temperature=: every row is read at the temperature that it was sampled at.

grpo: 1 error, 0 lints
"""

# Rows are sampled at one temperature, and the reference is asked at another.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8, temperature=0.6))
        batch = rl.group_advantages(ref.logprobs(batch, temperature=1.0))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.001)))
