"""A driver whose reward notes every real call in a file, and waits there until the test lets it go on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from small_flow import Numbers

import flowrl as fl
from flowrl.graph.ops.field_types import FieldType, parse_fields

HERE = Path(os.environ.get("ANSWERS", "."))
BATCHED = bool(os.environ.get("BATCHED"))


def note(what: str, x: float) -> None:
    """One line per call, whoever writes it."""
    file = os.open(HERE / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {x:g} {os.getpid()}\n".encode())
    os.close(file)


def score(x: float) -> float:
    note("begin", x)
    time.sleep(float(os.environ.get("DELAY", "0")))
    while x % 7 > 3 and not (HERE / "go").exists():
        time.sleep(0.02)
    note("end", x)
    return x / 2


async def score_async(x: float) -> float:
    return score(x)


def score_all(x: list[float]) -> list[float]:
    return [score(one) for one in x]


class NoTokenizer:
    """No row is read as text."""

    def get_vocab(self) -> dict[str, int]:
        return {}


class Asked(Numbers):
    """Rows with what a reward function is given."""

    def schema(self):
        return {**super().schema(), "prompt": FieldType("any"), **parse_fields("response_ids: i32[*response]")}

    def to_batch(self, rows, first_uid, tokenizer):
        batch = super().to_batch(rows, first_uid, tokenizer)
        numbers = [float(first_uid + i) for i in range(len(rows))]
        return batch.drop("x").with_columns(
            {
                "x": fl.Column.of(numbers, dtype="f32"),
                "prompt": fl.Column.of(["p"] * len(rows), dtype="any"),
                "response_ids": fl.Column.of([[1]] * len(rows), dim="response", dtype="i32"),
            }
        )


flow = fl.Flow("answers")
reward = flow.worker(
    fl.FunctionReward,
    score_all if BATCHED else score,
    batched=BATCHED,
    concurrency=3,
    timeout=None,
    tokenizer=NoTokenizer,
)


@flow.program
def answers(steps: int = 2):
    for step, batch in flow.steps(Asked(batch=7), steps):
        batch = reward.score(batch)
        flow.log(step, reward=batch.rewards.mean(), most=batch.rewards.max())


if __name__ == "__main__":
    flow.main()
