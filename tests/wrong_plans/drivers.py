"""Programs that some of the plans here are wrong for."""

import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=8)
flow = fl.Flow("drivers")
actor = flow.worker(fl.Actor, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, lambda prompt, response: 0.0)


@flow.program
def uncorrected(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = ref.logprobs(actor.logprobs(actor.generate(batch, n=2)))
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.1, anchor="old")))


@flow.program
def kept(steps: int = 3):
    before = None
    for step, batch in flow.steps(prompts, steps):
        batch = ref.logprobs(actor.logprobs(actor.generate(batch, n=2)))
        batch = rl.group_advantages(reward.score(batch))
        if before is not None:
            flow.log(step, actor.update(before, loss=rl.ppo_clip(kl=0.1, anchor="old")))
        before = batch


@flow.program
def twice(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        greedy = reward.score(actor.generate(batch, greedy=True))
        batch = ref.logprobs(actor.generate(batch, n=2))
        batch = rl.group_advantages(reward.score(batch))
        metrics = actor.update(batch, loss=rl.ppo_clip(kl=0.1))
        flow.log(step, metrics, greedy=greedy.rewards.mean())


@flow.program
def truncated(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = ref.logprobs(actor.generate(batch, n=2, top_p=0.9, support=True), support=True)
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="sampling", kl=0.1), support=True))
