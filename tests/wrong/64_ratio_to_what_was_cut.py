"""FieldError: actor.update with loss ratio compares log-probabilities of different kinds: 'sampling_logprobs' at temperature 1, cut by top_p=0.9, its own at temperature 1.
  at   tests/wrong/64_ratio_to_what_was_cut.py:28   flow.log(step, actor.update(batch, loss=ratio()))
  fix  Read rollout_logprobs: of the whole vocabulary, as those of the trainer are. Or take both sides of the tokens that could be drawn: generate(support=True), sampling_logprobs (a loss: anchor="sampling"), and support=True in logprobs and update.

grpo: 1 error, 0 lints
"""

# A loss of one's own takes the ratio to log-probabilities that top-p has cut.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")


@rl.loss(reads="sampling_logprobs, advantages, response_mask", corrects_stale=True)
def ratio(x):
    return -(x.predicted - x["sampling_logprobs"]).exp() * x["advantages"]


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=8, top_p=0.9)))
        flow.log(step, actor.update(batch, loss=ratio()))
