"""Which share of an engine's decode slots rollouts use whose episodes wait for their environment.

    make vllm; .venv-vllm/bin/python benchmarks/decode_slots.py --engine hf --engine vllm

Each episode has ``--turns`` turns of ``--tokens`` tokens, and its environment takes a log-normal time for each answer,
with a mean of ``--seconds`` and a sigma of 1. ``vllm`` takes ``--rows`` rows at a time, ``hf`` all. A model of random
weights samples, so turns seldom end early. Told is ``decode_slots_used`` of a step ([metrics](../docs/metrics.md)), the
median over ``--steps`` after one that is not counted, beside what is used where all episodes take their turns together:
each turn then takes as long as the slowest answer of all. Where there are more episodes than rows, one that waits
leaves its slot to another one. The time of a turn without waiting, which that estimate needs, is from a run without
waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "algorithms"))
from environment_step import at_least_one, where

import flowrl as fl
from flowrl import rl
from flowrl.placement.plan.plan import Plan
from tasks import arithmetic

SIGMA = 1.0
PLAN = """
pools: {{train: {{device: cpu}}, rollout: {{device: cpu}}}}
place:
  actor:
    train:    {{pool: train}}
    generate: {{pool: rollout, engine: {engine}}}
  game: {{pool: train}}
"""
#: As the plan says them; ``hf`` takes all rows that there are.
ENGINES = {"hf": "hf", "vllm": "vllm, kv_cache: 0.25, rows: {rows}"}


class Waits(fl.Env):
    """Answers with a letter, after a time that its seed draws."""

    began: ClassVar[list[float]] = []  # each episode, by the clock
    ended: ClassVar[list[float]] = []  # each turn

    def __init__(self, turns: int, seconds: float) -> None:
        self.turns, self.seconds = turns, seconds

    def reset(self, row: Any, seed: int) -> tuple[tuple[int, int], str]:
        self.began.append(time.perf_counter())
        return (seed, 0), "1"

    async def step(self, state: tuple[int, int], action: str) -> tuple[tuple[int, int], str, float, bool]:
        seed, turn = state
        await asyncio.sleep(answer_seconds(seed, turn, self.seconds))
        self.ended.append(time.perf_counter())
        return (seed, turn + 1), "1", 1.0, turn + 1 >= self.turns


def answer_seconds(seed: int, turn: int, mean: float) -> float:
    """How long the environment takes for one answer: log-normal, by the seed of the episode and its turn."""
    return mean * math.exp(SIGMA * random.Random(f"{seed}/{turn}").gauss(0, 1) - SIGMA**2 / 2)


def played(engine: str, rows: int, seconds: float, given: argparse.Namespace) -> tuple[float, float]:
    """The share of slots that rollouts of a run have used, and their seconds: medians over all steps but the first."""
    Waits.began.clear()
    Waits.ended.clear()
    flow = fl.Flow("slots")
    actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-5, max_tokens=given.tokens, name="actor")
    game = flow.worker(Waits, given.turns, seconds, name="game")

    @flow.program
    def play(steps: int = given.steps + 1) -> None:
        for step, batch in flow.steps(arithmetic.prompts(given.sessions), steps):
            batch = game.rollout(batch, policy=actor, n=1, turn_tokens=given.tokens)
            flow.log(step, actor.update(batch, loss=rl.sft()), length=batch.response_mask.row_sum().mean())

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.yaml").write_text(PLAN.format(engine=ENGINES[engine].format(rows=rows)))
        plan = Plan.load(Path(folder) / "plan.yaml")
        flow.run("play", out=Path(folder) / "run", plan=plan, runtime="local", quiet=True, save_models=False)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line)["game.rollout/decode_slots_used"] for line in lines]
    begins = [min(Waits.began[i : i + given.sessions]) for i in range(0, len(Waits.began), given.sessions)]
    ends = [max(e for e in Waits.ended if e < following) for following in (*begins[1:], math.inf)]
    took = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return median(shares[1:]), median(took[1:])


def measure(engine: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """The share of slots with waits and without, and what turns in lock step would use."""
    print(f"{engine}, {rows} rows ...", file=sys.stderr)

    share, took = played(engine, rows, 0.0, given)
    share_beside, took_beside = played(engine, rows, given.seconds, given)
    slowest = [
        sum(max(answer_seconds(seed, turn, given.seconds) for seed in draw) for turn in range(given.turns))
        for draw in ([random.random() for _ in range(given.sessions)] for _ in range(100))
    ]
    return {
        "engine": engine,
        "rows at a time": rows,
        "share without waits": round(share, 3),
        "share": round(share_beside, 3),
        "share in lock step": round(share * took / (took + median(slowest)), 3),
        "seconds without waits": round(took, 2),
        "seconds": round(took_beside, 2),
        "seconds in lock step": round(took + median(slowest), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="may be given more than once (hf)")
    parser.add_argument("--sessions", type=at_least_one, default=128, help="episodes of a step (128)")
    parser.add_argument("--rows", type=at_least_one, action="append", help="of vllm at a time (128 and 32)")
    parser.add_argument("--turns", type=at_least_one, default=4, help="of an episode (4)")
    parser.add_argument("--tokens", type=at_least_one, default=8, help="of a turn at most (8)")
    parser.add_argument("--seconds", type=float, default=0.1, help="that an answer takes on average (0.1)")
    parser.add_argument("--steps", type=at_least_one, default=5, help="that are counted (5)")
    given = parser.parse_args()
    several = given.rows or [128, 32]
    cases = [(e, r) for e in given.engine or ["hf"] for r in (several if e == "vllm" else [given.sessions])]
    found = [measure(engine, rows, given) for engine, rows in cases]
    print(json.dumps({"measured on": where(), "found": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
