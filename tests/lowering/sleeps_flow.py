"""GRPO's ops as sleeps: what the tests run that compare a run's schedule with the one that was simulated."""

from __future__ import annotations

import time

import torch

import flowrl as fl
from flowrl.graph.ops.field_types import FieldType
from flowrl.workers.model_worker import ModelWorker
from flowrl.workers.weights.weight_boxes import Shard, digest, sums

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


def sleep(title: str, rows: int = ROWS) -> None:
    """Take as long as was said, for a part of the rows that part of it."""
    time.sleep(SECONDS[title] * rows / ROWS)


class Weight:
    """An engine with one weight, which processes can move as they move those of models."""

    tokenizer = None

    def __init__(self) -> None:
        self.weight = torch.zeros(4)

    def plain_weights(self):
        return {"weight": self.weight}

    def take_weights(self, weights):
        self.weight.copy_(weights["weight"])

    def shards(self):
        return [Shard("weight", (4,), (0,), self.weight)]

    def weights_written(self):
        pass

    def state_shards(self):
        return self.shards(), {}

    def state(self):
        return self.plain_weights(), {}

    def digest(self):
        return digest([sums(self.shards())])


class Policy(ModelWorker):
    def open(self, opening):
        self._engine, self.serving = Weight(), opening.serving

    def build(self):
        raise AssertionError("its engine is its own")

    @fl.op(reads="x", adds="y: f32[]", cost="generate", pieces=True)
    def generate(self, batch):
        sleep("actor.generate", len(batch))
        return {"y": batch["x"]}

    @fl.op(reads="y, r, p", updates="weights", cost="train")
    def update(self, batch) -> fl.Metrics:
        sleep("actor.update")
        self.engine.weight.add_(1)
        self.mark_updated()
        return fl.Metrics(loss=0.0)

    def mark_published(self, version):
        if version and self.serving:  # the first is that of opening
            sleep("actor.publish")
        super().mark_published(version)


class Reference(fl.Worker):
    @fl.op(reads="y", adds="p: f32[]", cost="forward", pieces=True)
    def logprobs(self, batch):
        sleep("ref.logprobs", len(batch))
        return {"p": batch["y"]}


class Reward(fl.Worker):
    @fl.op(reads="y", adds="r: f32[]", cost="external", pieces=True)
    def score(self, batch):
        sleep("reward.score", len(batch))
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
