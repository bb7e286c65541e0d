"""Prompts given to replicas of an engine in three ways, and when the last replica ends: simulated, log-normal lengths.

    python benchmarks/replicas.py [--replicas 4] [--prompts 64] [--n 8] [--steps 40] [--seed 0]

``contiguous`` cuts the prompts of a step into runs of as many; ``prompts`` balances the tokens of the prompts, as for a
prompt that is new; ``known`` is what a run does once it has seen each prompt: balanced by the mean length that the
responses had the last time, the longest first. A replica has places for so many rows: a row takes the next one that is
free, and each token of all rows that run takes the same time. The median length of a prompt's responses is log-normal
over prompts, and so are its rows around it. Printed are makespans, as a ratio to that of ``known``, and the least that
any division could have: all tokens over all places, or the longest row.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Sequence

from flowrl.runtime.distributed.balance_rows import balanced, longest_first


def ends(lengths: Sequence[int], places: int) -> int:
    """When the last of rows ends that begin in this order, each as soon as one of the places is free."""
    free = [0] * min(places, max(1, len(lengths)))
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def makespan(rows: Sequence[Sequence[int]], parts: Sequence[Sequence[int]], places: int) -> int:
    """When the last replica ends, of which each has the rows of some prompts."""
    return max(ends([length for prompt in part for length in rows[prompt]], places) for part in parts)


def contiguous(count: int, replicas: int) -> list[list[int]]:
    """Prompts in their order, as many for each replica."""
    return [list(range(count * r // replicas, count * (r + 1) // replicas)) for r in range(replicas)]


def simulate(
    replicas: int, prompts: int, n: int, steps: int, spread: float, within: float, places: int, seed: int
) -> dict[str, float]:
    """The mean makespan of steps that draw from eight times as many prompts as they have, by way."""
    chance = random.Random(seed)
    data = [(chance.randrange(50, 400), chance.lognormvariate(5.0, spread)) for _ in range(8 * prompts)]
    keys = [(i,) for i in range(prompts)]
    took: dict[str, list[float]] = {"contiguous": [], "prompts": [], "known": [], "least": []}

    def drawn(median: float) -> list[int]:
        return [1 + min(4096, int(median * chance.lognormvariate(0.0, within))) for _ in range(n)]

    for _ in range(steps):
        step = chance.sample(data, prompts)
        last = [statistics.mean(drawn(median)) for _, median in step]
        rows = [drawn(median) for _, median in step]
        sizes = [prompt for prompt, _ in step]
        expected = [round(prompt + n * length) for prompt, length in zip(sizes, last, strict=True)]
        known = [longest_first(keys, part, expected) for part in balanced(expected, replicas)]
        ways = {"contiguous": contiguous(prompts, replicas), "prompts": balanced(sizes, replicas), "known": known}
        for way, parts in ways.items():
            took[way].append(makespan(rows, parts, places))
        every = [length for prompt in rows for length in prompt]
        took["least"].append(max(sum(every) / (replicas * places), max(every)))
    return {way: statistics.mean(spans) for way, spans in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--n", type=int, default=8, help="rows of a prompt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"{asked.replicas} replicas, {asked.prompts} prompts of {asked.n} rows, {asked.steps} steps")
    print(f"{'places':>6} {'sigma of prompts':>16} {'of rows':>8} {'contiguous':>11} {'prompts':>8} {'least':>6}")
    for places in (8, 16, 32):
        for spread, within in ((0.5, 0.5), (1.0, 0.5), (1.0, 0.25), (1.5, 0.5)):
            found = simulate(asked.replicas, asked.prompts, asked.n, asked.steps, spread, within, places, asked.seed)
            shown = {way: found[way] / found["known"] for way in ("contiguous", "prompts", "least")}
            print(
                f"{places:6} {spread:16} {within:8} {shown['contiguous']:10.2f}x {shown['prompts']:7.2f}x "
                f"{shown['least']:5.2f}x"
            )


if __name__ == "__main__":
    main()
