"""Online DPO (Guo et al. 2024, arXiv:2402.04792): DPO on pairs that the policy samples and a reward tells apart.

Departures: 1. of ``samples`` answers the best and the worst are a pair, where the paper has two; prompts whose answers
earn the same are left out. 2. a reward function judges, where the paper asks a language model.
"""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("online_dpo")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program
def online_dpo(
    steps: int = 300, prompts_per_step: int = 128, samples: int = 4, beta: float = 0.1, one_digit: float | None = None
) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts_per_step, one_digit=one_digit), steps):
        batch = actor.generate(batch, n=samples)
        batch = reward.score(batch)
        pairs = rl.pairs(batch)
        pairs = ref.logprobs(pairs)
        metrics = actor.update(pairs, loss=rl.dpo(beta=beta))
        flow.log(step, metrics, reward=batch.rewards.mean(), pairs=pairs.count() / 2)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
