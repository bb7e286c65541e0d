"""An environment that does what user code should not, at one row of step 1: FAULT says what, WHERE in which function."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "algorithms")]

from fault_flow import misbehave  # noqa: E402

import flowrl as fl  # noqa: E402
from tasks import guessing  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
BAD = 5  # the row


class Game(fl.Env):
    turns = 2
    timeout = float(os.environ.get("TIMEOUT", "0.5"))

    def reset(self, row, seed):
        self.at("reset", int(row["number"]))
        return int(row["number"]), "3"

    def step(self, state, action):
        self.at("step", state)
        return state, "4", float(state), False

    def anchor(self, state, observation):
        self.at("anchor", state)
        return observation

    def at(self, where, number):
        if number == BAD and where == os.environ.get("WHERE", "step"):
            misbehave(os.environ.get("FAULT", ""))


class Last(fl.Worker):
    """Keeps the latest rewards."""

    keeps = ("total",)

    def __init__(self):
        self.total = 0.0

    @fl.op(reads="rewards", updates="total", cost="train")
    def update(self, batch) -> fl.Metrics:
        self.total += float(batch.rewards.sum())
        return fl.Metrics(total=self.total)


flow = fl.Flow("faults")
model = fl.Model(config={**guessing.MODEL.config, **SMALL}, tokenizer=guessing.build_tokenizer)
actor = flow.worker(fl.Actor, model, lr=None, name="actor")
game = flow.worker(Game, name="game")
last = flow.worker(Last, name="last")
rows = fl.data.rows([{"prompt": "?", "number": i} for i in range(8)], batch=4, shuffle=False)


@flow.program
def faults(steps: int = 2):
    for step, batch in flow.steps(rows, steps):
        batch = game.rollout(batch, policy=actor, turn_tokens=1)
        flow.log(step, last.update(batch), reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
