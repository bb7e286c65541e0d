"""GRPO's ops as sleeps: what the tests run that compare a run's schedule with the one that was simulated."""

from __future__ import annotations

import time

import flowrl as fl
from flowrl.graph.types import FieldType

ROWS = 8
#: Seconds of a whole call.
SECONDS = {
    "actor.generate": 0.30,
    "reward.score": 0.10,
    "ref.logprobs": 0.14,
    "actor.update": 0.20,
    "actor.publish": 0.08,
}


class Numbers:
    """Each draw gives as many rows, with ``x`` = 0."""

    tokenizer = staticmethod(lambda: None)
    batch = ROWS

    def schema(self):
        return {"x": FieldType("f32")}

    def cursor(self):
        return self

    def draw(self, count):
        return [{} for _ in range(count or ROWS)]

    def to_batch(self, rows, first_uid, tokenizer):
        return fl.Batch.of([(first_uid + i,) for i in range(len(rows))], x=fl.Column.of([0.0] * len(rows), dtype="f32"))

    def state(self):
        return {}

    def load_state(self, state):
        pass


class Sleeper(fl.Worker):
    """Ops that take as long as was said, a part of the rows that part of it."""

    def sleep(self, op: str, rows: int = ROWS) -> None:
        time.sleep(SECONDS[f"{self.name}.{op}"] * rows / ROWS)


class Policy(Sleeper):
    keeps = ("weights",)

    def __init__(self) -> None:
        self.weights = 0

    @fl.op(reads="x", adds="y: f32[]", cost="generate", pieces=True)
    def generate(self, batch):
        self.sleep("generate", len(batch))
        return {"y": batch["x"]}

    @fl.op(reads="y, r, p", updates="weights", cost="train")
    def update(self, batch) -> fl.Metrics:
        self.sleep("update")
        self.weights += 1
        return fl.Metrics(loss=0.0)

    def stage(self):
        return self.weights

    def install(self, staged, version):
        if version:  # the first is that of opening
            self.sleep("publish")
        self.weights, self.version = staged, version


class Reference(Sleeper):
    @fl.op(reads="y", adds="p: f32[]", cost="forward", pieces=True)
    def logprobs(self, batch):
        self.sleep("logprobs", len(batch))
        return {"p": batch["y"]}


class Reward(Sleeper):
    @fl.op(reads="y", adds="r: f32[]", cost="external", pieces=True)
    def score(self, batch):
        self.sleep("score", len(batch))
        return {"r": batch["y"]}


flow = fl.Flow("sleeps")
actor = flow.worker(Policy)
ref = flow.worker(Reference)
reward = flow.worker(Reward)


@flow.program
def sleeps(steps: int = 3):
    for step, batch in flow.steps(Numbers(), steps):
        batch = actor.generate(batch)
        batch = reward.score(batch)
        batch = ref.logprobs(batch)
        flow.log(step, actor.update(batch), reward=batch.r.mean())
