"""FieldError: a subtraction compares log-probabilities of different kinds: 'old_logprobs.row_sum()' at temperature 1, 'sampling_logprobs.row_sum()' at temperature 1, cut by top_k=20.
  at   tests/wrong/168_ratio_of_sums_that_were_cut.py:23   moved = batch.old_logprobs.row_sum() - batch.sampling_logprobs.row_sum()
  fix  Read rollout_logprobs: of the whole vocabulary, as those of the trainer are. Or take both sides of the tokens that could be drawn: generate(support=True), sampling_logprobs (a loss: anchor="sampling"), and support=True in logprobs and update.

grpo: 1 error, 0 lints
"""

# A ratio of whole responses, of which one side is of the vocabulary and the other of what top-k left.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.logprobs(reward.score(actor.generate(batch, n=8, top_k=20)))
        moved = batch.old_logprobs.row_sum() - batch.sampling_logprobs.row_sum()
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), moved=moved.mean())
