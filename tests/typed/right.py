# pyright: strict
"""A driver whose every call has the type that a program gets; type checkers find nothing in it."""

from collections.abc import Iterator, Mapping
from typing import Any, assert_type

from torch import Tensor

import flowrl as fl
from flowrl import rl


def exact(response: str, answer: str) -> float:
    return float(response == answer)


@rl.loss(reads="advantages, response_mask")
def reinforce(x: rl.LossInputs, *, scale: float = 1.0) -> Tensor:
    return -scale * x["advantages"] * x.predicted


@fl.op(reads="response_ids", adds="brevity: f32[]", cost="local")
def brevity(batch: fl.Batch, *, weight: float = 0.1) -> dict[str, fl.Column]:
    return {"brevity": batch.response_ids.lengths_column() * -weight}


@fl.op(cost="local")
def half(value: float) -> float:
    return value / 2


class Memory(fl.Worker):
    """Counts answers."""

    keeps = ("seen",)

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight
        self.seen: dict[str, int] = {}

    @fl.op(reads="response_ids", adds="novelty: f32[]", cost="local")
    def rate(self, batch: fl.Batch, *, power: float = 1.0) -> Mapping[str, Any]:
        return {"novelty": [self.weight**power for _ in batch.response_ids]}

    @fl.op(reads="response_ids", updates="seen")
    def remember(self, batch: fl.Batch) -> fl.Metrics:
        return fl.Metrics(answers=float(batch.count()))


class Service(fl.Worker):
    """Answers rows one by one."""

    @fl.op(reads="response_ids", adds="grades: f32[]", cost="external", pieces="row")
    def grade(self, batch: fl.Batch, *, scale: float = 1.0) -> Iterator[tuple[int, dict[str, float]]]:
        for row in range(len(batch)):
            yield row, {"grades": scale * row}


class Count(fl.Env):
    """An environment of one turn."""

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[int, str]:
        return 0, str(row["prompt"])

    def step(self, state: int, action: str) -> tuple[int, str, float, bool]:
        return state + 1, "", float(action == "1"), True


rows = fl.data.generated(lambda index: {"prompt": f"{index}=", "answer": str(index)}, batch=8)

flow = fl.Flow("typed")
actor = flow.worker(fl.Actor, "some/model", lr=1e-6)
second = flow.worker(fl.Actor, "some/model", name="second")
ref = flow.worker(fl.Reference, of=actor)
critic = flow.worker(fl.Critic, "some/model")
reward = flow.worker(fl.FunctionReward, exact)
memory = flow.worker(Memory, weight=0.2)
game = flow.worker(Count)
service = flow.worker(Service)


@flow.program
def typed(steps: int = 10, kl: float = 1e-3) -> None:
    for step, batch in flow.steps(rows, steps):
        assert_type(step, int)
        assert_type(batch, fl.Batch)
        batch = assert_type(actor.generate(batch, n=4), fl.Batch)
        batch = assert_type(reward.score(batch, into={"rewards": "grades"}), fl.Batch)
        batch = assert_type(ref.logprobs(batch) | critic.values(batch), fl.Batch)
        batch = assert_type(memory.rate(brevity(batch, weight=0.2), power=2.0), fl.Batch)
        batch = batch.with_columns({"rewards": batch.grades + batch.brevity * batch.novelty})
        kept = assert_type(batch.filter(batch.group_std("rewards") > 0), fl.Batch)
        kept = assert_type(kept.concat(batch.filter(batch.rewards < -1)), fl.Batch)
        batch = assert_type(rl.gae(kept, lam=1.0), fl.Batch)
        batch = assert_type(rl.kl_penalty(batch, coef=kl, into={"token_rewards": "penalty"}), fl.Batch)
        metrics = assert_type(actor.update(batch, loss=reinforce(scale=0.5)), fl.Metrics)
        kl = assert_type(rl.adaptive_kl(kl, metrics.kl, target=0.02), float)
        assert_type(half(batch.rewards.mean()), float)
        critic_metrics = critic.update(batch, loss=rl.value_clip())
        played = assert_type(game.rollout(flow.take(rows, 4), policy=second, n=2), fl.Batch)
        played = assert_type(service.grade(played, scale=2.0), fl.Batch)
        flow.log(step, metrics, critic_metrics, memory.remember(played), reward=batch.rewards.mean(), kl=kl)


def by_hand(policy: fl.Actor, judge: fl.FunctionReward, prompts: fl.Batch) -> float:
    """The same types on plain workers."""
    batch = assert_type(judge.score(policy.generate(prompts)), fl.Batch)
    return batch.rewards.mean()


if __name__ == "__main__":
    flow.main()
