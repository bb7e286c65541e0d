"""FieldError: actor.update with loss ppo_clip compares log-probabilities of different kinds: 'sampling_logprobs' at temperature 1, cut by top_p=0.9, 'ref_logprobs' at temperature 1.
  at   tests/wrong/172_reference_of_the_whole_vocabulary.py:25   flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling", kl=0.001), support=True))
  fix  Read rollout_logprobs: of the whole vocabulary, as those of the trainer are. Or take both sides of the tokens that could be drawn: generate(support=True), sampling_logprobs (a loss: anchor="sampling"), and support=True in logprobs and update.

grpo: 1 error, 0 lints
"""

# The policy is trained among the tokens that could be drawn, and held to a reference of the whole vocabulary.
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
        batch = ref.logprobs(actor.generate(batch, n=8, top_p=0.9, support=True))
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling", kl=0.001), support=True))
