"""PPO for language models (Ouyang et al. 2022, arXiv:2203.02155; Schulman et al. 2017, arXiv:1707.06347).

``--preset vapo`` has the two lambdas of VAPO (arXiv:2504.05118), its wider clip and its token mean.
Departures: 1. the KL penalty to the reference is an estimate on the sampled tokens (k1), added to the reward of each.
2. actor and critic take one optimizer step on the whole batch; their updates have ``minibatch=`` and ``epochs=``.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("ppo")
actor = flow.worker(fl.Actor, model=arithmetic.MODEL, lr=1e-4, max_tokens=8)
critic = flow.worker(fl.Critic, model=arithmetic.MODEL, lr=3e-4)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


PRESETS = {
    "ppo": {},
    "vapo": {"lam_returns": 1.0, "alpha": 2.0, "clip_high": 0.28},
}


@flow.program(presets=PRESETS)
def ppo(
    steps: int = 400,
    prompts_per_step: int = 128,
    kl: float = 1e-3,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_returns: float | None = None,
    alpha: float | None = None,
    clip_high: float | None = None,
    one_digit: float | None = None,
) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch)
        batch = reward.score(batch) | ref.logprobs(batch) | critic.values(batch)
        batch = rl.kl_penalty(batch, coef=kl)
        batch = rl.gae(batch, gamma=gamma, lam=lam, lam_returns=lam_returns, alpha=alpha)
        critic_metrics = critic.update(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(clip_high=clip_high))
        flow.log(step, metrics, critic_metrics, reward=batch.rewards.mean())


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
