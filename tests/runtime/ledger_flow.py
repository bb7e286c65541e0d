"""A program without a model that refills, filters, holds rows back and leaves them, as it is told step by step."""

from __future__ import annotations

import json
from collections import UserList

from small_flow import Numbers

import flowrl as fl

#: Keys of the rows that were really sampled, and trained on.
SAMPLED: UserList[tuple[int, ...]] = UserList()
TRAINED: UserList[tuple[int, ...]] = UserList()


class Sampler(fl.Worker):
    tokenizer = None  # texts are not written down

    @fl.op(reads="x", adds="y: f32[]", rows="expand", cost="generate")
    def generate(self, batch, *, n: int = 2):
        SAMPLED.extend(batch.expand(n).keys)
        return {"y": (batch.expand(n).row_seeds() % 9 + 1).float()}

    @fl.op(reads="x", adds="y: f32[], response_ids: i32[*response]", rows="expand", cost="generate")
    def write(self, batch, *, n: int = 2):
        rows = batch.expand(n)
        sizes = (rows.row_seeds() % 9 + 1).tolist()
        ids = fl.Column.of([[0] * size for size in sizes], dim="response", dtype="i32")
        return {"y": fl.Column.of([float(size) for size in sizes], dtype="f32"), "response_ids": ids}


class Counter(fl.Worker):
    keeps = ("total",)

    def __init__(self):
        self.total = 0.0

    @fl.op(reads="y", updates="total", cost="train")
    def update(self, batch) -> fl.Metrics:
        TRAINED.extend(batch.keys)
        self.total += float(batch.y.sum())
        return fl.Metrics(total=self.total)


class Judge(fl.Worker):
    @fl.op(reads="y", adds="r: f32[]", cost="external")
    def judge(self, batch):
        return {"r": batch.y.values * 2}


flow = fl.Flow("ledger")
sampler = flow.worker(Sampler)
judge = flow.worker(Judge)
counter = flow.worker(Counter)


@flow.program
def ledger(steps: int = 4, says: str = "[]"):
    """``says``: for each step [prompts to refill with, longest that is kept, whether rows are held until the next]."""
    listed, count, held = json.loads(says), 0, None
    for step, batch in flow.steps(Numbers(batch=3), steps):
        more, longest, hold = listed[count % len(listed)] if listed else (0, 99, False)
        count += 1  # noqa: SIM113  the trace's step is no number
        if more:
            batch = batch.concat(flow.more(more))
        rows = judge.judge(sampler.generate(batch, n=3))
        rows = rows.filter(rows.y <= float(longest))
        if held is not None:
            rows, held = rows.concat(held), None
        if hold:
            held = rows
            flow.log(step, held=rows.count())
        else:
            metrics = counter.update(rows)
            flow.log(step, metrics)


@flow.program
def lengths(steps: int = 12, longest: int = 99, every: int = 1):
    """Rows longer than ``longest`` are left out; else only prompts whose number can be divided by ``every`` are taken."""
    for step, batch in flow.steps(Numbers(batch=24), steps):
        rows = sampler.write(batch, n=4)
        rows = rows.filter(rows.y <= float(longest))
        rows = rows.filter(rows.x % float(every) == 0.0)
        flow.log(step, counter.update(rows))
