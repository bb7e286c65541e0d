"""GRPO on a model so small that whole runs of it compare bit for bit: what the tests of staleness run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

SMALL = {
    **arithmetic.MODEL.config,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MODEL = fl.Model(config=SMALL, tokenizer=arithmetic.build_tokenizer)


def digits(prompt: str, response: str) -> float:
    """A reward with something to learn from the first token on."""
    return sum(c in "13579" for c in response) - 0.1 * len(response)


flow = fl.Flow("stale")
actor = flow.worker(fl.Actor, MODEL, lr=3e-3, max_tokens=5)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, digits)
PROMPTS, GROUP = 4, 3


@flow.program
def stale(steps: int = 6):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        batch = actor.generate(batch, n=GROUP)
        batch = reward.score(batch)
        batch = ref.logprobs(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(kl=1e-3))
        flow.log(step, metrics, reward=batch.rewards.mean(), oldest=batch.versions.row_mean().min())


@flow.program
def every_other(steps: int = 6):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        batch = actor.generate(batch, n=GROUP)
        batch = reward.score(batch)
        batch = rl.group_advantages(batch)
        if step % 2:
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
        else:
            flow.log(step, reward=batch.rewards.mean())


@flow.program
def evaluated(steps: int = 6):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        batch = actor.generate(batch, n=GROUP)
        batch = rl.group_advantages(reward.score(batch))
        metrics = actor.update(batch, loss=rl.ppo_clip())
        if step % 3 == 1:
            greedy = reward.score(actor.generate(flow.take(arithmetic.heldout(8, repeat=True)), greedy=True))
            flow.log(step, metrics, exact=float(greedy.rewards.mean()), at=greedy.versions.row_mean().min())
        else:
            flow.log(step, metrics, oldest=batch.versions.row_mean().min())


@flow.program
def refills(steps: int = 5):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        rows = reward.score(actor.generate(batch, n=GROUP))
        while float(rows.rewards.sum()) < 6 and len(rows) < 30:
            rows = rows.concat(reward.score(actor.generate(flow.more(2), n=GROUP)))
        metrics = actor.update(rl.group_advantages(rows), loss=rl.ppo_clip())
        flow.log(step, metrics, tried=len(rows))


def two_more(rows):
    return rows.concat(reward.score(actor.generate(flow.more(1), n=2)))


def filled(rows):
    return filled(two_more(rows)) if len(rows) < 14 else rows


@flow.program
def six_rounds(steps: int = 3, by_itself: bool = True):
    for step, batch in flow.steps(arithmetic.prompts(1), steps):
        rows = reward.score(actor.generate(batch, n=2))
        if by_itself:
            rows = filled(rows)
        else:
            while len(rows) < 14:
                rows = two_more(rows)
        metrics = actor.update(rl.group_advantages(rows), loss=rl.ppo_clip())
        versions = rows.versions.row_mean()
        flow.log(step, metrics, oldest=versions.min(), newest=versions.max())


@flow.program
def uncorrected(steps: int = 3, allow: bool = False):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        batch = actor.logprobs(actor.generate(batch, n=GROUP))
        batch = rl.group_advantages(reward.score(batch))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="old"), allow_stale=allow))


@flow.program
def kept(steps: int = 3):
    before = None
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        batch = rl.group_advantages(reward.score(actor.logprobs(actor.generate(batch, n=GROUP))))
        if before is not None:
            flow.log(step, actor.update(before, loss=rl.ppo_clip(anchor="old")))
        before = batch
