"""FieldError: actor.update with loss ppo_clip compares log-probabilities of different kinds: 'sampling_logprobs' at temperature 1, cut by top_p=0.9, top_k=50, its own at temperature 1.
  at   tests/wrong/171_trained_without_the_support.py:24   flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling")))
  fix  Read rollout_logprobs: of the whole vocabulary, as those of the trainer are. Or take both sides of the tokens that could be drawn: generate(support=True), sampling_logprobs (a loss: anchor="sampling"), and support=True in logprobs and update.

grpo: 1 error, 0 lints
"""

# The anchor is the distribution that was sampled from, and the update is told nothing of it.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8, top_k=50, top_p=0.9, support=True)
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling")))
