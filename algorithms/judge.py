"""GRPO with a judge (Zheng et al. 2023, arXiv:2306.05685): a second model reads every answer, its word is the reward.

The judge has a tokenizer of its own: text goes from one model to the other. ``--program teach`` teaches it to tell
right sums from wrong ones; one that is there already is ``fl.Actor("its/name", lr=None)``, which is never trained.
``--program two_agents`` has it learn on, by whether its verdicts were right.

Departures: 1. the verdict is one sampled token, of which several (``votes``) are averaged, where the paper has a grade
from 1 to 10 with an explanation. 2. as in grpo.py.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("judge")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=3e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
judge = flow.worker(fl.Actor, arithmetic.JUDGE, lr=1e-3, max_tokens=1)
verdict = flow.worker(fl.FunctionReward, arithmetic.says_yes, tokenizer=judge)
truth = flow.worker(fl.FunctionReward, arithmetic.says_the_truth, tokenizer=judge)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def judged(
    steps: int = 300, prompts_per_step: int = 64, group_size: int = 8, votes: int = 1, one_digit: float = 0.8
) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch, n=group_size)
        asked = judge.ask(batch, arithmetic.QUESTION)
        said = verdict.score(judge.generate(asked, n=votes))
        batch = rl.collect(batch, said, rewards="mean")
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip())
        right = reward.score(batch.drop("rewards")).rewards.mean()  # which the actor is not told
        flow.log(step, metrics, reward=batch.rewards.mean(), exact_match=right)


@flow.program
def two_agents(
    steps: int = 300,
    prompts_per_step: int = 64,
    group_size: int = 8,
    votes: int = 4,
    trust: float = 0.5,
    one_digit: float = 0.8,
) -> None:
    """A solver and a verifier learn beside each other (Zha et al. 2025, arXiv:2505.15034), each from its own tokens."""
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = reward.score(actor.generate(batch, n=group_size), into={"rewards": "right"})
        said = verdict.score(judge.generate(judge.ask(batch, arithmetic.QUESTION), n=votes), into={"rewards": "yes"})
        said = rl.group_advantages(truth.score(said), scale="none")
        batch = rl.collect(batch, said, yes="mean")
        batch = rl.group_advantages(batch.with_columns({"rewards": batch.right + batch.yes * trust}))
        metrics = actor.update(batch, loss=rl.ppo_clip())
        judged_right = judge.update(said, loss=rl.ppo_clip(entropy=0.01))
        flow.log(step, metrics, judged_right, reward=batch.right.mean(), truth=said.rewards.mean())


@flow.program
def teach(steps: int = 300, rows: int = 128, lr: float = 1e-3, one_digit: float = 0.8) -> None:
    """The judge learns to say whether a sum is right."""
    for step, batch in flow.steps(arithmetic.verdicts(rows, one_digit=one_digit), steps):
        rate = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        flow.log(step, judge.update(batch, loss=rl.sft(), lr=rate))


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
