"""On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649): the student samples, teachers grade its tokens.

The advantage of a token is ``log p_teacher - log p_student``: the reverse KL at that token, with discount 0. With
``--preset several`` each teacher grades the prompts that it knows, with ``--preset sampled_jsd`` by another divergence.
With ``full``, ``forward`` and ``jsd`` a divergence of the whole distributions is the loss.

Departures: 1. all rows are the student's own; mixing in given ones (lambda of the paper) is left out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("distillation")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=3e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
other_weights = replace(arithmetic.MODEL, seed=1)  # a teacher with those of the student would teach nothing
short, long = (flow.worker(fl.Actor, other_weights, name=name) for name in ("short", "long"))
teacher = flow.worker(fl.Reference, of=long)
other = flow.worker(fl.Reference, of=short)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


PRESETS: dict[str, dict[str, Any]] = {
    "one": {},
    "several": {"several": True},
    "sampled_jsd": {"kind": "jsd"},
    "full": {"full": True},
    "forward": {"full": True, "loss": partial(rl.divergence, "forward_kl")},
    "jsd": {"full": True, "loss": partial(rl.divergence, "jsd", beta=0.5)},
}


@flow.program(presets=PRESETS)
def distillation(
    steps: int = 300,
    prompts_per_step: int = 256,
    several: bool = False,
    kind: str = "reverse_kl",
    full: bool = False,
    one_digit: float = 0.8,
    loss: Callable[..., rl.Loss] = rl.full_kl,
) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch)
        if full:
            batch = teacher.distribution(batch)
            metrics = actor.update(batch, loss=loss())
        else:
            batch = graded(batch) if several else teacher.logprobs(batch)
            batch = rl.teacher_advantages(batch, kind=kind)
            metrics = actor.update(batch, loss=rl.ppo_clip())
        batch = reward.score(batch)
        flow.log(step, metrics, reward=batch.rewards.mean())


def graded(batch: fl.Batch) -> fl.Batch:
    """Short prompts by the teacher of these, the others by the other one."""
    short = batch.prompt_ids.lengths_column() == 4
    return teacher.logprobs(batch.filter(~short)).concat(other.logprobs(batch.filter(short)))


@flow.program
def teach(steps: int = 300, rows: int = 128, lr: float = 1e-3, one_digit: float = 0.8) -> None:
    """Two teachers: ``short`` learns sums of two digits, ``long`` all sums."""
    for step, batch in flow.steps(arithmetic.examples(rows, one_digit=one_digit), steps):
        rate = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        metrics = long.update(batch, loss=rl.sft(), lr=rate)
        more = short.update(batch.filter(batch.prompt_ids.lengths_column() == 4), loss=rl.sft(), lr=rate)
        flow.log(step, metrics, more)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
