"""Workers with state of every kind, declared well or not: what tests of resuming run."""

from __future__ import annotations

from collections import Counter, deque

import torch
from small_flow import Numbers

import flowrl as fl


class Memory(fl.Worker):
    """Keeps what a checkpoint can hold, nested; its answers depend on all of it."""

    keeps = ("total", "seen", "last", "table", "tree")

    def __init__(self) -> None:
        self.total = 0.0
        self.seen: dict[int, int] = {}
        self.last: deque[float] = deque(maxlen=3)
        self.table = torch.zeros(7)
        self.tree = {"counts": Counter(), "pairs": [(0, {"weights": torch.ones(2)})], "empty": torch.zeros(0)}

    @fl.op(reads="x", adds="y: f32[]")
    def value(self, batch):
        (_, leaf), *_ = self.tree["pairs"]
        shift = self.total + sum(self.last) + len(self.seen) + float(self.table.sum()) + float(leaf["weights"].sum())
        return {"y": batch.x.values + shift + self.tree["counts"][3]}

    @fl.op(reads="x", updates="seen")
    def remember(self, batch) -> fl.Metrics:
        for x in batch.x.to_list():
            self.seen[int(x)] = self.seen.get(int(x), 0) + 1
            self.last.append(x)
            self.table[int(x)] += 1
            self.tree["counts"][int(x)] += 1
        self.tree["pairs"][0][1]["weights"] *= 1.1
        self.total = round(self.total * 0.5 + batch.x.mean(), 6)
        return fl.Metrics(total=self.total)

    def digest(self) -> str:
        return repr((self.total, self.seen, self.last, self.table.tolist(), self.tree))


flow = fl.Flow("remembers")
memory = flow.worker(Memory)


@flow.program
def remembers(steps: int = 8):
    for step, batch in flow.steps(Numbers(), steps):
        batch = memory.value(batch)
        flow.log(step, memory.remember(batch), y=batch.y.mean())
