"""RLHF in three stages (Ouyang et al. 2022, arXiv:2203.02155): supervised, reward model, PPO against it, with EMA.

``python algorithms/rlhf.py --program sft,preferences,rlhf,evaluate`` runs them in a row. The average of the policy's
weights over the steps (as in DeepSpeed-Chat) is what is evaluated beside it.

Departures: 1. the critic starts anew, where the paper starts it from the reward model. 2. no pretraining rows; see
safe_rlhf for ``pretraining=``.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("rlhf")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-4, max_tokens=arithmetic.MAX_TOKENS)
average = flow.worker(fl.Actor, arithmetic.MODEL, max_tokens=arithmetic.MAX_TOKENS)
critic = flow.worker(fl.Critic, arithmetic.MODEL, lr=3e-4)
ref = flow.worker(fl.Reference, of=actor)
judge = flow.worker(fl.RewardModel, arithmetic.MODEL, lr=5e-4, betas=(0.9, 0.99))
exact = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def sft(steps: int = 120, rows: int = 128, lr: float = 1e-3) -> None:
    """Stage 1: the actor learns the form of an answer, and some of the sums."""
    for step, batch in flow.steps(arithmetic.examples(rows, one_digit=0.5), steps):
        rate = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        flow.log(step, actor.update(batch, loss=rl.sft(), lr=rate))


@flow.program
def preferences(steps: int = 200, pairs: int = 128, one_digit: float | None = None) -> None:
    """Stage 2: a reward model learns which of two answers is the right one."""
    for step, batch in flow.steps(arithmetic.preferences(pairs, one_digit=one_digit), steps):
        flow.log(step, judge.update(batch, loss=rl.bradley_terry(center=0.01)))


@flow.program
def rlhf(
    steps: int = 150, prompts_per_step: int = 128, kl: float = 0.02, decay: float = 0.95, one_digit: float | None = None
) -> None:
    """Stage 3: PPO against the reward model; ``average`` follows the actor."""
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch)
        batch = judge.score(batch) | ref.logprobs(batch) | critic.values(batch)
        batch = rl.kl_penalty(batch, coef=kl)
        batch = rl.gae(batch, whiten=True)
        critic_metrics = critic.update(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip())
        average.follow(actor, decay=decay if step > 0 else 0.0)
        right = exact.score(batch.drop("rewards"))
        flow.log(step, metrics, critic_metrics, reward=batch.rewards.mean(), exact_match=right.rewards.mean())


@flow.program
def evaluate(one_digit: float | None = None) -> None:
    """Greedy answers of the policy and of its average."""
    for step, prompts in flow.steps(arithmetic.prompts(256, one_digit=one_digit, seed=9), 1):
        mine = exact.score(actor.generate(prompts, greedy=True))
        averaged = exact.score(average.generate(prompts, greedy=True))
        flow.log(step, greedy_exact_match=mine.rewards.mean(), average_exact_match=averaged.rewards.mean())


if __name__ == "__main__":
    flow.main()
