"""A flow whose program keeps a list at module level: what the trace, and a run that goes back, must not carry along."""

from __future__ import annotations

from small_flow import Counter, Numbers

import flowrl as fl

LEVELS = [1]

flow = fl.Flow("levels")
counter = flow.worker(Counter)


@flow.program
def levels(steps: int = 6):
    for step, batch in flow.steps(Numbers(), steps):
        LEVELS.append(LEVELS[-1] + 1)
        metrics = counter.update(counter.values(batch), scale=float(LEVELS[-1]))
        flow.log(step, metrics, level=LEVELS[-1])
