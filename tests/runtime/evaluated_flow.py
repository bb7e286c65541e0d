"""A flow without models that trains, and programs that evaluate it: what the tests of evaluations run."""

from __future__ import annotations

from small_flow import CALLS, Counter, Numbers, World

import flowrl as fl

flow = fl.Flow("train")
counter = flow.worker(Counter, start=1.0)
world = flow.worker(World)
tester = flow.worker(World)
HELD = Numbers(batch=3, rows=6)


@flow.program
def train(steps: int = 10, warm: int = 0, tail: bool = False):
    """Rewards that touch the world, a value that is read in each step, and two loops where asked."""
    scale = 1.0
    for step, batch in flow.steps(Numbers(), warm):
        flow.log(step, counter.update(counter.values(batch)))
    for step, batch in flow.steps(Numbers(), steps):
        batch = world.judge(counter.values(batch))
        scale = 0.9 * scale + 0.01 * float(batch.r.mean())
        flow.log(step, counter.update(batch, scale=scale), reward=batch.r.mean(), scale=scale)
    if tail:
        flow.log(steps, after=world.judge(counter.values(flow.take(Numbers()))).r.mean())


@flow.program
def evaluate(level: float = 0.0):
    """Two steps, of which each reads a number, and asks the world."""
    for step, batch in flow.steps(HELD):
        found = tester.judge(counter.values(batch)).r.mean()
        flow.log(step, score=found, above=float(found) > level)


@flow.program
def probe():
    for step, batch in flow.steps(Numbers(batch=2), 1):
        flow.log(step, seen=counter.values(batch).y.mean())


@flow.program
def spoils():
    for step, batch in flow.steps(Numbers(), 1):
        flow.log(step, counter.update(counter.values(batch)))


__all__ = ["CALLS", "flow"]
