"""On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649): the student samples, teachers grade its tokens.

The advantage of a token is ``log p_teacher - log p_student``: the reverse KL at that token, with discount 0. With
``--preset several`` each teacher grades the prompts that it knows.

Departures: 1. the KL is the estimate on the sampled token (k1), where the papers also have the whole distribution.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("distillation")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=3e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
short, long = (flow.worker(fl.Actor, arithmetic.MODEL, name=name) for name in ("short", "long"))
teacher = flow.worker(fl.Reference, of=long)
other = flow.worker(fl.Reference, of=short)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program(presets={"one": {}, "several": {"several": True}})
def distillation(steps: int = 300, prompts_per_step: int = 256, several: bool = False):
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=0.5), steps):
        batch = actor.generate(batch)
        if several:
            is_long = batch.prompt_ids.lengths_column() > 5
            batch = teacher.logprobs(batch.filter(is_long)).concat(other.logprobs(batch.filter(~is_long)))
        else:
            batch = teacher.logprobs(batch)
        batch = rl.kl_penalty(batch, coef=1.0, into={"token_rewards": "advantages"})
        metrics = actor.update(batch, loss=rl.ppo_clip())
        batch = reward.score(batch)
        flow.log(step, metrics, reward=batch.rewards.mean(), reverse_kl=-batch.advantages.mean())


@flow.program
def teach(steps: int = 500, rows: int = 128, lr: float = 1e-3):
    """Two teachers: one learns sums of two two-digit numbers, one those with an operand of one digit."""
    for step, batch in flow.steps(arithmetic.examples(rows, one_digit=0.3), steps):
        rate = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        is_long = batch.prompt_ids.lengths_column() > 5
        metrics = long.update(batch, loss=rl.sft(), lr=rate)
        more = short.update(batch.filter(~is_long), loss=rl.sft(), lr=rate)
        flow.log(step, metrics, more)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
