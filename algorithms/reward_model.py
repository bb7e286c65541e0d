"""A reward model from preferences (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

Departures: 1. the scores are not shifted to mean 0 afterwards; ``--center 0.01`` holds them near 0 in training. 2. one
pair per prompt, where the paper has all pairs of a ranking.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("reward_model")
judge = flow.worker(fl.RewardModel, arithmetic.MODEL, lr=5e-4, betas=(0.9, 0.99), schedule="linear", total=400)


@flow.program
def reward_model(steps: int = 400, pairs: int = 128, center: float = 0.0, one_digit: float | None = None) -> None:
    for step, batch in flow.steps(arithmetic.preferences(pairs, one_digit=one_digit), steps):
        metrics = judge.update(batch, loss=rl.bradley_terry(center=center))
        flow.log(step, metrics)


@flow.program
def evaluate(one_digit: float | None = None) -> None:
    """How the judge scores answers to sums that it was not trained on: right ones, and wrong ones."""
    for step, batch in flow.steps(arithmetic.preferences(256, one_digit=one_digit, seed=9), 1):
        batch = judge.score(batch)
        flow.log(step, right=batch.filter(batch.preferred).rewards.mean(), all=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
