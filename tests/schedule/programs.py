"""Programs of calls without any code behind them, and a clock with made-up times: what the schedule's tests run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from flowrl.schedule.engine_slots import Rows
from flowrl.schedule.events import Call, Follower, Setup
from flowrl.schedule.machine import Machine
from flowrl.schedule.virtual_clock import VirtualClock

SPLIT = {"actor": Follower("train", "rollout")}
COLOCATED = {"actor": Follower("gpu", "gpu")}
SHARED = {"actor": Follower("gpu", "gpu", shared=True)}


@dataclass
class Times:
    """Seconds by title; ``chance`` makes every call take another time."""

    by_title: dict[str, float] = field(default_factory=dict)
    chance: random.Random | None = None
    engine: Callable[[Call], Rows | None] = lambda call: None
    shares: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)

    def seconds(self, call: Call) -> float:
        if self.chance is not None:
            return self.chance.choice((0.0, 0.5, 1.0, self.chance.expovariate(0.3)))
        return self.by_title.get(call.title, 0.0)

    def rows(self, call: Call) -> Rows | None:
        return self.engine(call)

    def parts(self, call: Call) -> dict[tuple[str, str], float]:
        return self.shares.get(call.title, {})

    def publish_parts(self, worker: str) -> dict[tuple[str, str], float]:
        return self.shares.get(f"{worker}.publish", {})

    def publish(self, worker: str) -> float:
        return (
            self.chance.choice((0.0, 0.3)) if self.chance is not None else self.by_title.get(f"{worker}.publish", 0.0)
        )

    def swap(self, pool: str, resident: str, what: str) -> float:
        return self.by_title.get(f"{resident}.swap", 0.0)


class Driver:
    """A program that makes its calls on a virtual clock. Calls give ids, which later calls take as inputs."""

    def __init__(self, setup: Setup, times: Times, pools: dict[str, str]) -> None:
        self.clock = VirtualClock(Machine(setup), times)
        self.machine, self.pools, self.split = self.clock.machine, pools, setup
        self.next, self.step = 0, -1
        self.calls: list[Call] = []

    def call(self, title: str, *inputs: int, pool: str | None = None, **more) -> int:
        pools = (pool if pool is not None else self.pools[title],)
        made = Call(self.next, self.step, title, tuple(p for p in pools if p), tuple(inputs), **more)
        self.next += 1
        self.calls.append(made)
        self.clock.issue(made)
        return made.id

    def generate(self, *inputs: int, relaxed: bool = True, groups: int = 1, **more) -> int:
        relaxed = relaxed and self.step >= 0
        return self.call("actor.generate", *inputs, serves=("actor",), relaxed=relaxed, groups=groups, **more)

    def score(self, *inputs: int) -> int:
        return self.call("reward.score", *inputs, reads=("reward",), rowwise=True)

    def logprobs(self, *inputs: int) -> int:
        return self.call("ref.logprobs", *inputs, reads=("ref",), rowwise=True, queues=True)

    def update(self, *inputs: int) -> int:
        return self.call("actor.update", *inputs, reads=("actor",), updates="actor")

    def read(self, *ids: int) -> None:
        self.clock.wait_for(ids)

    def steps(self, count: int):
        for number in range(count):
            self.clock.open(number)
            self.step = number
            yield number
            self.step = -1
            self.clock.close(number)


def setup(followers=None, pools=("train", "rollout", "cpu"), **more) -> Setup:
    return Setup(pools, SPLIT if followers is None else followers, **more)


def pools_of(followers) -> dict[str, str]:
    actor = followers["actor"]
    return {
        "actor.generate": actor.generate,
        "actor.update": actor.train,
        "actor.logprobs": actor.train,
        "ref.logprobs": actor.train,
        "critic.values": actor.train,
        "critic.update": actor.train,
        "reward.score": "cpu",
    }
