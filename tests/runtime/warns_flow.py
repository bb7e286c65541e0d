"""A flow whose ops warn, as ops of users and libraries do."""

from __future__ import annotations

import warnings

from small_flow import Counter, Numbers

import flowrl as fl

flow = fl.Flow("warns")


class Warns(Counter):
    @fl.op(reads="x", adds="y: f32[]", cost="forward", pieces=True)
    def values(self, batch):
        warnings.warn("numbers are old", stacklevel=1)
        warnings.warn("this way goes away", FutureWarning, stacklevel=1)
        return {"y": batch.x.values + self.total}


def grade(prompt: str, response: str) -> float:
    warnings.warn("a grade is rough", stacklevel=1)
    return 1.0


counter = flow.worker(Warns)


@flow.program
def warns(steps: int = 3):
    for step, batch in flow.steps(Numbers(), steps):
        flow.log(step, counter.update(counter.values(batch)))
