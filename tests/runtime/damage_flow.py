"""A flow whose run folder has everything that can be damaged: tensors, records, values that were read, answers."""

from __future__ import annotations

from kept_flow import Memory
from small_flow import CALLS, Counter, Numbers, World

import flowrl as fl

flow = fl.Flow("train")
memory = flow.worker(Memory)
counter = flow.worker(Counter, start=1.0)
world = flow.worker(World)


@flow.program
def train(steps: int = 8):
    """Reads a value in every step; its weights depend on all of its state and all answers."""
    scale = 1.0
    for step, batch in flow.steps(Numbers(), steps):
        batch = world.judge(counter.values(batch))
        scale = 0.5 * scale + 0.01 * float(batch.r.mean())
        metrics = counter.update(batch, scale=scale)
        seen = memory.remember(batch)
        flow.log(step, metrics, seen=seen, scale=scale)


__all__ = ["CALLS", "flow"]
