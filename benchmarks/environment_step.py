"""What flowrl adds to a step of an environment, in microseconds, beside the same loop written by hand.

    python benchmarks/environment_step.py --sessions 4096 --turns 16

Both play the same games with the same engine (``fl.testing.FakeEngine``, a table) and the same seeds, and have to come
to the same rows: tokens, masks, log-probabilities and rewards, bit for bit. The loop by hand has all games take their
turns together; ``Env.rollout`` runs each on its own, checks what it is given, and makes more fields, such as versions
and turns. The time of the engine, of the tokenizer and of the environment is in both, so the difference is flowrl's.
The ratio says what a step costs where these take next to nothing: with a model and an environment of any size it comes
near to 1, and the microseconds stay.

Seconds are those of the CPU, of all threads of the process. The two take turns, each begins every other round, and the
first round is not counted; told are the medians of differences and ratios within a round, and the largest. The exit
status is 1 where the median step costs ``--bound`` microseconds more than by hand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.workers.decode_slots import DecodeSlots, counted_in

SAME = ("tokens", "response_mask", "rollout_logprobs", "rewards")  # fields that both make


class Digits:
    """A tokenizer of 16 tokens, each a letter: what text costs is not what is measured."""

    eos_token_id = 0
    letters = "abcdefghijklmnop"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.letters[i] for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.letters)}


class Count(fl.Env):
    """Answers each letter with the next one; over after ``turns`` turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, row: Any, seed: int) -> tuple[int, str]:
        return 0, "b"

    def step(self, state: int, action: str) -> tuple[int, str, float, bool]:
        return state + 1, "c", float(action == "d"), state + 1 >= self.turns


def prompts(sessions: int) -> fl.Batch:
    ids = fl.Column.of([[1, 2]] * sessions, dim="prompt", dtype="i32")
    return fl.Batch.of(sessions, prompt_ids=ids).with_call(CallInfo(op="count.rollout"))


def by_hand(sessions: int, turns: int) -> tuple[float, fl.Batch]:
    """CPU seconds, and the rows, of the loop as a user would write it."""
    env, tokenizer, rows = Count(turns), Digits(), prompts(sessions).expand(1)
    stream = fl.testing.FakeEngine(vocab=16, stop=(), tokenizer=tokenizer).stream
    sampling = fl.testing.Sampling(max_tokens=1)
    began = time.process_time()
    seeds, columns = rows.row_seeds(), rows["prompt_ids"].to_list()
    states, observations = zip(*(env.reset({}, seed) for seed in seeds.tolist()), strict=True)
    states = list(states)
    tokens = [p + tokenizer.encode(o) for p, o in zip(columns, observations, strict=True)]
    masks, logprobs, rewards = [[False]] * sessions, [[0.0]] * sessions, [0.0] * sessions
    masks, logprobs = [list(m) for m in masks], [list(p) for p in logprobs]
    live = list(range(sessions))
    while live:
        column = fl.Column.of([tokens[i] for i in live], dim="prompt", dtype="i32")
        starts = torch.tensor([len(masks[i]) for i in live])
        answers = stream.submit(fl.testing.SampleRequest(column, 1, seeds[torch.tensor(live)], sampling, starts))
        going = []
        for row in answers:
            i = live[row.row]
            states[i], said, reward, done = env.step(states[i], tokenizer.decode(list(row.ids)))
            ids = [] if done else tokenizer.encode(said)
            tokens[i] += [*row.ids, *ids]
            masks[i] += [True] * len(row.ids) + [False] * len(ids)
            logprobs[i] += [*row.rollout_logprobs, *[0.0] * len(ids)]
            rewards[i] += reward
            if not done:
                going.append(i)
        live = sorted(going)
    made = fl.Batch.of(
        list(rows.keys),
        tokens=fl.Column.of(tokens, dim="token", dtype="i32"),
        response_mask=fl.Column.of(masks, dim="response", dtype="bool"),
        rollout_logprobs=fl.Column.of(logprobs, dim="response", dtype="f32"),
        rewards=fl.Column.of(rewards, dtype="f32"),
    )
    return time.process_time() - began, made


def by_flowrl(sessions: int, turns: int) -> tuple[float, fl.Batch]:
    """The same of ``Env.rollout``."""
    model = fl.Model(config={"model_type": "qwen2"})
    engine = fl.testing.FakeEngine(vocab=16, stop=(), tokenizer=Digits())
    actor, rows = fl.open(fl.Actor(model, max_tokens=1), engine=engine), prompts(sessions)
    env = fl.open(Count(turns))
    began = time.process_time()
    played = env.rollout(rows, policy=actor)
    return time.process_time() - began, played


def at_least_one(text: str) -> int:
    """Read a count. Raises argparse's error for what is none."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def where() -> str:
    """On what this is measured: machine, versions and commit."""
    cpu = Path("/proc/cpuinfo")
    names = (
        [line.partition(": ")[2] for line in cpu.read_text().splitlines() if line.startswith("model name")]
        if cpu.exists()
        else []
    )
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    load = f", load {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    machine = f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}{load}"
    return f"{machine}, Python {platform.python_version()}, torch {torch.__version__}, commit {commit or 'unknown'}"


def expect_same_rows(hand: fl.Batch, own: fl.Batch) -> None:
    """Raise SystemExit where the two have not done the same."""
    other = [name for name in SAME if not hand[name].equal(own[name])]
    if hand.keys != own.keys or other:
        raise SystemExit(f"the loop by hand and Env.rollout have made other rows: {', '.join(other) or 'keys'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=at_least_one, default=4096, help="games that are played at a time (4096)")
    parser.add_argument("--turns", type=at_least_one, default=16, help="steps of each (16)")
    parser.add_argument("--repeats", type=at_least_one, default=5, help="rounds that are counted (5)")
    parser.add_argument("--bound", type=float, default=50.0, help="microseconds that a step may cost more (50)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps = given.sessions * given.turns
    hand, own = list[float](), list[float]()
    slots, both = DecodeSlots(), [(by_hand, hand), (by_flowrl, own)]
    for turn in range(given.repeats + 1):  # the first is not counted
        made: dict[str, fl.Batch] = {}
        for measured, each in both if turn % 2 else reversed(both):
            gc.collect()  # else what the other one left is in its time
            with counted_in(slots):
                seconds, made[measured.__name__] = measured(given.sessions, given.turns)
            if turn:
                each.append(1e6 * seconds / steps)
        expect_same_rows(made["by_hand"], made["by_flowrl"])
    overheads = [b - a for a, b in zip(hand, own, strict=True)]
    ratios = [b / a for a, b in zip(hand, own, strict=True)]
    told = {
        "sessions": given.sessions,
        "turns": given.turns,
        "repeats": given.repeats,
        "microseconds per step by hand": round(median(hand), 1),
        "microseconds per step of Env.rollout": round(median(own), 1),
        "overhead in microseconds": round(median(overheads), 1),
        "overhead in microseconds, largest": round(max(overheads), 1),
        "ratio": round(median(ratios), 2),
        "ratio, largest": round(max(ratios), 2),
        "decode slots used": slots.share,
        "measured on": where(),
    }
    print(json.dumps(told, indent=1))
    if median(overheads) >= given.bound:
        print(
            f"a step costs {median(overheads):.1f} microseconds more than by hand; the bound is {given.bound:g}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
