"""A flow whose programs log in every way: what its records must not lose."""

from __future__ import annotations

import numpy as np
import torch
from small_flow import Counter, Numbers

import flowrl as fl
from flowrl.graph.ops.field_types import FieldType, parse_fields


class Measures(fl.Worker):
    @fl.op(reads="x")
    def measure(self, batch, *, size: int = 1) -> fl.Metrics:
        return fl.Metrics(half=np.float32(0.5), two=torch.full((size,), 2.0), three=np.int64(3))


class Placed(Numbers):
    """Rows with columns that are called like the place of a row in the records."""

    def schema(self):
        any_ = FieldType("any")
        return {**super().schema(), "step": any_, "key": any_, **parse_fields("response_ids: i32[*response]")}

    def to_batch(self, rows, first_uid, tokenizer):
        count = len(rows)
        said = fl.Column.of(["of the data"] * count, dtype="any")
        ids = fl.Column.of([[1, 2]] * count, dim="response", dtype="i32")
        return (
            super().to_batch(rows, first_uid, tokenizer).with_columns({"step": said, "key": said, "response_ids": ids})
        )


flow = fl.Flow("both")
first = flow.worker(Counter, start=1.0)
second = flow.worker(Counter, start=2.0)
measures = flow.worker(Measures)


@flow.program
def both(steps: int = 2):
    for step, batch in flow.steps(Numbers(), steps):
        one, two = first.update(first.values(batch)), second.update(second.values(batch))
        flow.log(step, one, two, first=0.5)


@flow.program
def unknown(steps: int = 3):
    """What these metrics are called shows when the calls are done."""
    for step, batch in flow.steps(Numbers(), steps):
        flow.log(step, first.update(first.values(batch)))
        flow.log(step, second.update(second.values(batch)))


@flow.program
def between(rounds: int = 3):
    for number in range(rounds):
        batch = flow.take(source, 2)
        flow.log(number, first.update(first.values(batch)))


@flow.program
def measured(steps: int = 2, size: int = 1):
    for step, batch in flow.steps(Numbers(), steps):
        metrics = measures.measure(batch, size=size)
        flow.log(step, metrics)


@flow.program
def noted(steps: int = 2):
    for step, batch in flow.steps(Numbers(), steps):
        flow.log(step, first.update(first.values(batch)), note="a\u2028b\x85c")


@flow.program
def placed(steps: int = 1):
    for step, batch in flow.steps(Placed(), steps):
        flow.log(step, y=first.values(batch).y.mean())


source = Numbers()
