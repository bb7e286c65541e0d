"""GRPO (Shao et al. 2024, arXiv:2402.03300) and what differs from it in mathematics alone: one program, many presets.

Departures: 1. the loss is a mean over the tokens of the step, as in DAPO, not over responses first. 2. one optimizer
step per step, so the ratio is that to the policy that sampled. 3. with ``kl=0``, groups
whose rewards are all equal are not computed: their gradient is zero. docs/algorithms.md has those of the presets.
"""

from collections.abc import Callable
from functools import partial

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

center = partial(rl.advantages, scale="none")  # the difference to the mean of the group alone
returns = partial(rl.advantages, of="returns", center="none", scale="none", whiten=True)
PRESETS = {
    "grpo": {},
    "dr_grpo": {
        "kl": 0.0,
        "advantages": center,
        "loss": partial(rl.ppo_clip, aggregate="seq-mean-token-sum-norm", norm=arithmetic.MAX_TOKENS),
    },
    "rloo": {
        "kl": 0.0,
        "kl_in_reward": 1e-3,
        "advantages": partial(center, of="total", leave_one_out=True),
        "loss": partial(rl.reinforce, aggregate="seq-mean-token-sum"),
    },
    "reinforce_plus_plus": {
        "kl": 0.0,
        "kl_in_reward": 1e-3,
        "prompts_per_step": 512,
        "group_size": 1,
        "advantages": returns,
    },
    "reinforce_plus_plus_baseline": {
        "advantages": partial(center, whiten=True),
        "loss": partial(rl.ppo_clip, kl_kind="k2"),
    },
    "gspo": {"kl": 0.0, "loss": rl.gspo},
    "cispo": {"kl": 0.0, "loss": rl.cispo},
    "sapo": {"kl": 0.0, "loss": rl.sapo},
    "gmpo": {"kl": 0.0, "loss": rl.gmpo},
    "gpg": {"kl": 0.0, "informative": True, "advantages": center, "loss": rl.reinforce},
    "opo": {"kl": 0.0, "advantages": partial(center, center="optimal"), "loss": rl.reinforce},
    "pass_at_k": {"kl": 0.0, "advantages": partial(rl.pass_at_k, k=3)},
    "dppo": {"kl": 0.0, "loss": rl.dppo},
    "topr": {"kl": 0.0, "loss": rl.topr},
    "kimi": {"kl": 0.0, "advantages": center, "loss": rl.quadratic},
    "clip_cov": {
        "kl": 0.0,
        "select": partial(rl.select_by_covariance, how="drawn", low=1.0, high=5.0),
        "loss": rl.clip_cov,
    },
    "kl_cov": {"kl": 0.0, "select": rl.select_by_covariance, "loss": rl.kl_cov},
    "vespo": {"kl": 0.0, "loss": rl.vespo},
    "m2po": {
        "kl": 0.0,
        "old_policy": True,
        "minibatch": 256,
        "select": rl.select_by_second_moment,
        "loss": rl.m2po,
    },
    "high_entropy": {
        "kl": 0.0,
        "entropies": True,
        "select": rl.select_by_entropy,
        "loss": partial(rl.ppo_clip, clip_high=0.28, only="selected"),
    },
    "deepseek_v3_2": {
        "advantages": center,
        "loss": partial(
            rl.ppo_clip,
            kl_weighted=True,
            correction=rl.off_policy_mask(0.5),
            aggregate="seq-mean-token-mean",
        ),
    },
    "decoupled_ppo": {"kl": 0.0, "old_policy": True, "minibatch": 256, "loss": rl.decoupled_ppo},
}

flow = fl.Flow("grpo")
actor = flow.worker(
    fl.Actor,
    arithmetic.MODEL,
    lr=1.5e-4,
    betas=(0.9, 0.99),
    schedule="linear",
    warmup=100,
    total=800,
    max_tokens=arithmetic.MAX_TOKENS,
)
ref = flow.worker(fl.Reference, of=actor)  # the actor as it is when the program starts
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program(presets=PRESETS)
def grpo(
    steps: int = 800,
    prompts_per_step: int = 64,
    group_size: int = 8,
    kl: float = 1e-3,
    kl_in_reward: float = 0.0,
    informative: bool = False,
    old_policy: bool = False,
    entropies: bool = False,
    minibatch: int | None = None,
    lr: float | None = None,
    one_digit: float | None = None,
    advantages: Callable[[fl.Batch], fl.Batch] = rl.advantages,
    select: Callable[[fl.Batch], fl.Batch] | None = None,
    loss: Callable[..., rl.Loss] = rl.ppo_clip,
) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch, n=group_size)
        batch = reward.score(batch)
        mean_reward = batch.rewards.mean()
        if informative:
            batch = batch.filter(batch.group_std("rewards") > 0)
        if kl or kl_in_reward:
            batch = ref.logprobs(batch)
        if kl_in_reward:
            batch = rl.kl_penalty(batch, coef=kl_in_reward)
        batch = advantages(batch)
        if old_policy:
            batch = actor.logprobs(batch)
        if entropies:
            batch = actor.entropies(batch)
        if select:
            batch = select(batch)
        metrics = actor.update(batch, loss=loss(kl=kl), minibatch=minibatch, lr=lr)
        flow.log(step, metrics, reward=mean_reward)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
