"""A source of one number per row, so that no tokenizer is in the way of what a call costs."""

from __future__ import annotations

import flowrl as fl
from flowrl.graph.ops.field_types import FieldType


class Numbers:
    """Each draw gives ``rows`` rows with ``x`` = 0."""

    tokenizer = staticmethod(lambda: None)

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def schema(self):
        return {"x": FieldType("f32")}

    def cursor(self):
        return self

    def draw(self, count):
        return [{} for _ in range(self.rows)]

    def to_batch(self, rows, first_uid, tokenizer):
        return fl.Batch.of([(first_uid + i,) for i in range(len(rows))], x=fl.Column.of([0.0] * len(rows), dtype="f32"))

    def state(self):
        return {}
