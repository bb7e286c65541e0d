"""GRPO (Shao et al. 2024, arXiv:2402.03300): several answers per prompt; each is compared with the mean of its group.

Departures: 1. the loss is a mean over the tokens of the step, as in DAPO, not over responses first. 2. one optimizer
step per step, so the ratio is that to the policy that sampled. 3. with ``kl=0``, groups whose rewards are all equal are
not computed: their gradient is zero. ``--preset`` takes one of its variants: algorithms/presets/grpo.py.
"""

from collections.abc import Callable

import flowrl as fl
from flowrl import rl
from presets.grpo import variants
from tasks import arithmetic

flow = fl.Flow("grpo")
actor = flow.worker(
    fl.Actor, arithmetic.MODEL, lr=1.5e-4, betas=(0.9, 0.99), schedule="linear", warmup=100, total=800, max_tokens=8
)
ref = flow.worker(fl.Reference, of=actor)  # the actor as it is when the program starts
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program(presets=variants(actor, ref))
def grpo(
    steps: int = 800,
    prompts_per_step: int = 64,
    group_size: int = 8,
    kl: float = 1e-3,
    minibatch: int | None = None,
    lr: float | None = None,
    one_digit: float | None = None,
    advantages: Callable[[fl.Batch], fl.Batch] = rl.advantages,
    loss: Callable[..., rl.Loss] = rl.ppo_clip,
) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch, n=group_size)
        batch = reward.score(batch)
        mean_reward = batch.rewards.mean()
        if kl:
            batch = ref.logprobs(batch)
        batch = advantages(batch)
        metrics = actor.update(batch, loss=loss(kl=kl), minibatch=minibatch, lr=lr)
        flow.log(step, metrics, reward=mean_reward)


arithmetic.stages(flow, actor, reward)  # two more programs: warmup and evaluate

if __name__ == "__main__":
    flow.main()
