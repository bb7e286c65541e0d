"""How long an episode that waits for its environment holds up the others.

    python benchmarks/straggler.py --sessions 256 --seconds 30

The same games are played with and without one whose third step takes ``--seconds``, by plain functions and by ``async``
ones, with the same engine (``fl.testing.FakeEngine``, a table whose steps take a millisecond). Told is how much later
than without it each other row has ended, the median and the most of all rows, beside the time of one step of the
engine. The two take turns ``--repeats`` times, and medians are told. The exit status is 1 where the row that was held
up most has ended more than ``--bound`` seconds later.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from statistics import median
from typing import Any

import torch
from environment_step import Digits, prompts

import flowrl as fl

TURNS = 8
STEP = 0.001  # seconds of a step of the engine


class Waits(fl.Env):
    """Answers each letter with the next one; the first episode waits in its third step."""

    turns = TURNS
    timeout = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ended: dict[int, float] = {}
        self.episodes = 0

    def reset(self, row: Any, seed: int) -> tuple[tuple[int, int], str]:
        self.episodes += 1
        return (self.episodes - 1, 0), "b"

    def step(self, state: tuple[int, int], action: str) -> tuple[tuple[int, int], str, float, bool]:
        if self._waits(state):
            time.sleep(self.seconds)
        return self._next(state)

    def _waits(self, state: tuple[int, int]) -> bool:
        return state == (0, 2) and self.seconds > 0

    def _next(self, state: tuple[int, int]) -> tuple[tuple[int, int], str, float, bool]:
        number, turn = state
        self.ended[number] = time.monotonic()
        return (number, turn + 1), "c", 1.0, turn + 1 >= TURNS


class Plain(Waits):
    timeout = 600.0


class Async(Waits):
    timeout = 600.0

    async def step(self, state: tuple[int, int], action: str) -> Any:
        if self._waits(state):
            await asyncio.sleep(self.seconds)
        return self._next(state)


def ends(kind: type[Waits], sessions: int, seconds: float) -> list[float]:
    """Seconds from the beginning to the end of each episode but the first."""
    engine = fl.testing.FakeEngine(vocab=16, stop=(), tokenizer=Digits(), token_seconds=STEP)
    actor = fl.open(fl.Actor(fl.Model(config={"model_type": "qwen2"}), max_tokens=1), engine=engine)
    worker, rows = kind(seconds), prompts(sessions)
    env = fl.open(worker)
    gc.collect()  # else it comes somewhere within
    began = time.monotonic()
    env.rollout(rows, policy=actor)
    return [worker.ended[number] - began for number in range(1, sessions)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bound", type=float, default=0.1, help="seconds that another row may end later (0.1)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for kind in (Plain, Async):
        ends(kind, given.sessions, 0.0)  # not counted
        pairs = [
            (sorted(ends(kind, given.sessions, 0.0)), sorted(ends(kind, given.sessions, given.seconds)))
            for _ in range(given.repeats)
        ]
        each = [[b - a for a, b in zip(without, beside, strict=True)] for without, beside in pairs]
        later = [median(rows) for rows in zip(*each, strict=True)]
        told = {
            "functions": kind.__name__.lower(),
            "sessions": given.sessions,
            "seconds of the one that waits": given.seconds,
            "step of the engine": STEP,
            "repeats": given.repeats,
            "others end, without it": round(median(max(without) for without, _ in pairs), 3),
            "others end, beside it": round(median(max(beside) for _, beside in pairs), 3),
            "later, median": round(median(later), 3),
            "later, most": round(max(later), 3),
        }
        worst = max(worst, max(later))
        print(json.dumps(told, indent=1))
    return 0 if worst <= given.bound else 1


if __name__ == "__main__":
    sys.exit(main())
