"""FieldError: actor.update with loss ppo_clip reads 'ref_logprobs', which no op before it adds.
  at   tests/wrong/05_kl_without_reference.py:26   flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=kl)))
  have advantages, finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rewards, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Add ref = flow.worker(fl.Reference, of=actor) and batch = ref.logprobs(batch) before this line.

grpo: 1 error, 0 lints
"""

# A loss with a KL term needs the log-probabilities of a reference.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 10, kl: float = 1e-3):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        batch = reward.score(batch)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=kl)))
