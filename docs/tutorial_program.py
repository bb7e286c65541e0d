"""Best of n: imitate the best of n answers to a prompt, as much as it beats the average one."""

from typing import Any

import flowrl as fl
from flowrl import rl
from tasks import arithmetic


class Choice(fl.Worker):
    @fl.op(reads="rewards", adds="margin: f32[]", rows="filter", cost="local")
    def best(self, batch: fl.Batch) -> fl.Batch:
        first = [max(rows, key=lambda row: batch.rewards[row]) for rows in batch.groups()]
        return batch.with_columns({"margin": batch.rewards - batch.group_mean("rewards")}).take(first)


@rl.loss(reads="margin: f32[], response_mask")
def imitate(x: rl.LossInputs, *, scale: float = 1.0) -> Any:
    return -scale * x["margin"] * x.predicted


flow = fl.Flow("best_of_n")
actor = flow.worker(fl.Actor, model=arithmetic.MODEL, lr=1e-4, betas=(0.9, 0.99), max_tokens=8)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)
choice = flow.worker(Choice)


@flow.program
def best_of_n(steps: int = 200, prompts: int = 128, n: int = 8, scale: float = 1.0) -> None:
    for step, batch in flow.steps(arithmetic.prompts(prompts), steps):
        batch = actor.generate(batch, n=n)
        batch = reward.score(batch)
        best = choice.best(batch)
        metrics = actor.update(best, loss=imitate(scale=scale))
        flow.log(step, metrics, reward=batch.rewards.mean(), best=best.rewards.mean())


if __name__ == "__main__":
    flow.main()
