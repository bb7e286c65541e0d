"""What flowrl adds to a step of an environment, in microseconds, beside the same loop written by hand.

    python benchmarks/environment_step.py --sessions 4096 --turns 16

Both play the same games with the same engine (``fl.testing.FakeEngine``, a table) and make the same rows. The loop by
hand has all games take their turns together; ``Env.rollout`` runs each on its own. The time of the engine, of the
tokenizer and of the environment is in both; what is told is the difference. Seconds are those of the CPU. The two take
turns, and medians are told; the exit status is 1 where a step costs 50 microseconds more than by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import torch

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.workers.decode_slots import DecodeSlots, counted_in

BOUND = 50.0  # microseconds of a step


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


def by_hand(sessions: int, turns: int) -> tuple[float, int]:
    """CPU seconds, and how many tokens were sampled, of the loop as a user would write it."""
    env, tokenizer, rows = Count(turns), Digits(), prompts(sessions)
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
    fl.Batch.of(
        sessions,
        tokens=fl.Column.of(tokens, dim="token", dtype="i32"),
        response_mask=fl.Column.of(masks, dim="response", dtype="bool"),
        rollout_logprobs=fl.Column.of(logprobs, dim="response", dtype="f32"),
        rewards=rewards,
    )
    return time.process_time() - began, sum(map(sum, masks))


def by_flowrl(sessions: int, turns: int) -> tuple[float, int]:
    """The same of ``Env.rollout``."""
    model = fl.Model(config={"model_type": "qwen2"})
    engine = fl.testing.FakeEngine(vocab=16, stop=(), tokenizer=Digits())
    actor, rows = fl.open(fl.Actor(model, max_tokens=1), engine=engine), prompts(sessions)
    env = fl.open(Count(turns))
    began = time.process_time()
    played = env.rollout(rows, policy=actor)
    return time.process_time() - began, int(played.response_mask.values.sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps = given.sessions * given.turns
    each: dict[str, list[float]] = {"by hand": [], "flowrl": []}
    slots = DecodeSlots()
    for turn in range(given.repeats + 1):  # the first is not counted
        for name, measured in (("by hand", by_hand), ("flowrl", by_flowrl)):
            with counted_in(slots):
                seconds, tokens = measured(given.sessions, given.turns)
            assert tokens == steps, "both sample the same tokens"
            if turn:
                each[name].append(1e6 * seconds / steps)
    hand, own = median(each["by hand"]), median(each["flowrl"])
    overheads = [b - a for a, b in zip(each["by hand"], each["flowrl"], strict=True)]
    told = {
        "sessions": given.sessions,
        "turns": given.turns,
        "repeats": given.repeats,
        "microseconds per step by hand": round(hand, 1),
        "microseconds per step of Env.rollout": round(own, 1),
        "overhead in microseconds": round(median(overheads), 1),
        "overhead in microseconds, largest": round(max(overheads), 1),
        "ratio": round(own / hand, 2),
        "decode slots used": slots.share,
    }
    print(json.dumps(told, indent=1))
    return 0 if median(overheads) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
