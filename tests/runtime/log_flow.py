"""A flow whose programs log in every way: what its records must not lose."""

from __future__ import annotations

from small_flow import Counter, Numbers

import flowrl as fl

flow = fl.Flow("both")
first = flow.worker(Counter, start=1.0)
second = flow.worker(Counter, start=2.0)


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


source = Numbers()
