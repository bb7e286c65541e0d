"""FieldError: support=True reads which tokens could be drawn, and no op before it adds 'support_ids'.
  at   tests/wrong/170_support_not_recorded.py:24   flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling"), support=True))
  have advantages, finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rewards, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Write support=True in generate too, or leave it out here.

grpo: 1 error, 0 lints
"""

# A ratio to what top-p has left, of rows that do not say which tokens that were.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=8, top_p=0.9)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling"), support=True))
