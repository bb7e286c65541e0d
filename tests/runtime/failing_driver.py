"""A driver whose reward fails for the rows that a file names, and notes every call of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from answers_driver import Asked, NoTokenizer, note

import flowrl as fl

HERE = Path(os.environ.get("ANSWERS", "."))


def score(x: float) -> float:
    note("begin", x)
    if x in json.loads((HERE / "failing").read_text()):
        raise OSError(f"no answer to {x:g}")
    return x / 2


flow = fl.Flow("failing")
reward = flow.worker(fl.FunctionReward, score, on_error="mark", tokenizer=NoTokenizer)


@flow.program
def failing(steps: int = 1):
    for step, batch in flow.steps(Asked(batch=16), steps):
        batch = reward.score(batch)
        batch = batch.filter(~batch.failed)
        flow.log(step, reward=batch.rewards.mean(), kept=batch.count())


if __name__ == "__main__":
    flow.main()
