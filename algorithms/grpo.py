"""GRPO (Shao et al. 2024, arXiv:2402.03300): clipped policy gradient on group-normalised rewards, no critic.

Departures: 1. the loss is a mean over the tokens of the step, as in DAPO, not over responses first. 2. one optimizer
step per step, so the ratio is that to the policy that sampled. 3. with ``kl=0``, groups
whose rewards are all equal are not computed: their gradient is zero.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("grpo")
actor = flow.worker(
    fl.Actor, arithmetic.MODEL, lr=1.5e-4, betas=(0.9, 0.99), schedule="linear", warmup=100, total=800, max_tokens=8
)
ref = flow.worker(fl.Reference, of=actor)  # the actor as it is when the program starts
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def grpo(steps: int = 800, prompts_per_step: int = 64, group_size: int = 8, kl: float = 1e-3):
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step), steps):
        batch = actor.generate(batch, n=group_size)
        batch = reward.score(batch)
        batch = ref.logprobs(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl))
        flow.log(step, metrics, reward=batch.rewards.mean())


@flow.program
def warmup(steps: int = 400, rows: int = 128, lr: float = 1e-3):
    """A supervised warm-up: the actor learns the form of an answer, and some of the sums."""
    for step, batch in flow.steps(arithmetic.examples(rows, one_digit=0.5), steps):
        rate = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        flow.log(step, actor.update(batch, loss=rl.sft(), lr=rate))


@flow.program
def evaluate():
    """Greedy answers to held-out sums of two-digit numbers."""
    for step, batch in flow.steps(arithmetic.heldout()):
        batch = actor.generate(batch, greedy=True)
        batch = reward.score(batch)
        flow.log(step, greedy_exact_match=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
