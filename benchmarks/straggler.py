"""How long an episode that waits for its environment holds up the others.

    python benchmarks/straggler.py --sessions 256 --seconds 10 --repeats 5

The same games are played with and without one whose third step takes ``--seconds``, by plain functions and by ``async``
ones, with the same engine (``fl.testing.FakeEngine``, a table whose steps take a millisecond). Told is how much later
than without it each other episode has ended: of each the median over the ``--repeats``, in which the two take turns,
and of these the median and the most, beside the time of one step of the engine. Seconds are those on the clock, so
other work on the machine is in them. It takes as long as all those waits, twice: two minutes as above. The exit status
is 1 where the episode that was held up most has ended more than ``--bound`` seconds later.
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
from environment_step import Digits, at_least_one, prompts, where

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
        self.ended[number] = time.perf_counter()
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
    """Seconds from the beginning to the end of each episode but the first, which waits."""
    engine = fl.testing.FakeEngine(vocab=16, stop=(), tokenizer=Digits(), token_seconds=STEP)
    actor = fl.open(fl.Actor(fl.Model(config={"model_type": "qwen2"}), max_tokens=1), engine=engine)
    worker, rows = kind(seconds), prompts(sessions)
    env = fl.open(worker)
    gc.collect()  # else it comes somewhere within
    began = time.perf_counter()
    env.rollout(rows, policy=actor)
    return [worker.ended[number] - began for number in range(1, sessions)]


def at_least_two(text: str) -> int:
    """Read a count of episodes. Raises argparse's error where there are no others beside the one that waits."""
    if (number := at_least_one(text)) < 2:
        raise argparse.ArgumentTypeError("one episode has no others beside it")
    return number


def seconds(text: str) -> float:
    """Read how long one waits. Raises argparse's error for what nobody could notice."""
    if (number := float(text)) < 0.1:
        raise argparse.ArgumentTypeError(f"{number} is less than a tenth of a second: nobody would be held up by it")
    return number


def measure(kind: type[Waits], given: argparse.Namespace) -> dict[str, Any]:
    """Play the games of one kind of functions; what is told of them, and progress on the way."""
    pairs: list[tuple[list[float], list[float]]] = []
    ends(kind, given.sessions, 0.0)  # not counted
    for number in range(given.repeats):
        print(f"{kind.__name__.lower()} functions, {number + 1} of {given.repeats} ...", file=sys.stderr)
        pairs.append((ends(kind, given.sessions, 0.0), ends(kind, given.sessions, given.seconds)))
    each = [[b - a for a, b in zip(without, beside, strict=True)] for without, beside in pairs]
    later = [median(episode) for episode in zip(*each, strict=True)]
    return {
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=at_least_two, default=256, help="episodes that are played at a time (256)")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="for which one of them waits (10)")
    parser.add_argument("--repeats", type=at_least_one, default=3, help="times with it and without it (3)")
    parser.add_argument("--bound", type=float, default=0.1, help="seconds that another one may end later (0.1)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(kind, given) for kind in (Plain, Async)]
    print(json.dumps({"measured on": where(), "found": found}, indent=1))
    worst = max(each["later, most"] for each in found)
    if worst > given.bound:
        print(f"an episode ended {worst:g} seconds later; the bound is {given.bound:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
