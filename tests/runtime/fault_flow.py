"""Rewards that do what user code should not, at one row: FAULT says what, KIND how they are called."""

import asyncio
import ctypes
import os
import signal
import sys
import time
import warnings

import flowrl as fl
from flowrl.graph.ops.field_types import FieldType

KIND = os.environ.get("KIND", "row")
BAD = 5  # the row


def misbehave(fault):
    match fault:
        case "hang":
            time.sleep(1000)
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "ends":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where it takes too much memory
        case "crashes":
            ctypes.string_at(0)
        case "forks":
            if child := os.fork():
                os.waitpid(child, 0)  # it is ended where it comes back, and has said so by then
        case "moves":
            os.chdir("/")
        case "prints":
            for i in range(3000):
                print(f"{i:5}", "x" * 1000, file=sys.stderr if i % 2 else sys.stdout)
        case "warns":
            for i in range(3000):
                warnings.warn(f"{i} {'x' * 100}", stacklevel=1)
        case "long":
            raise ValueError("x" * 10_000_000)
        case "half":
            raise ValueError("half a pair: \ud800")


def row(number: int) -> float:
    if number == BAD:
        misbehave(os.environ.get("FAULT", ""))
    return float(number)


async def awaited(number: int) -> float:
    await asyncio.sleep(0)
    return row(number)


def batched(number):
    return [row(n) for n in number]


class Custom(fl.Worker):
    @fl.op(reads="number", adds="rewards: f32[]", cost="external")
    def score(self, batch):
        return {"rewards": batched(batch.number.to_list())}


class Counter(fl.Worker):
    keeps = ("total",)

    def __init__(self):
        self.total = 0.0

    @fl.op(reads="rewards", updates="total", cost="train")
    def update(self, batch) -> fl.Metrics:
        self.total += batch.rewards.sum()
        return fl.Metrics(total=self.total)

    def digest(self):
        return repr(self.total)


class Rows:
    """Four rows a step, with a number each."""

    tokenizer = staticmethod(lambda: None)

    def schema(self):
        ids = {f"{n}_ids": FieldType("i32", (f"*{n}",)) for n in ("prompt", "response")}
        return {"number": FieldType("i64"), "prompt": FieldType("any"), **ids}

    def cursor(self):
        return Place()

    def to_batch(self, rows, first_uid, tokenizer):
        numbers = [r["number"] for r in rows]
        ids = fl.Column.of([[1]] * len(rows), dim="response", dtype="i32")
        prompts = fl.Column.of([[1]] * len(rows), dim="prompt", dtype="i32")
        return fl.Batch.of(
            [(first_uid + i,) for i in range(len(rows))],
            number=fl.Column.of(numbers, dtype="i64"),
            prompt=fl.Column.of([f"{n}+1=" for n in numbers], dtype="any"),
            prompt_ids=prompts,
            response_ids=ids,
        )


class Place:
    def __init__(self):
        self.at = 0

    def draw(self, count):
        self.at += count or 4
        return [{"number": i} for i in range(self.at - (count or 4), self.at)]

    def state(self):
        return {"at": self.at}

    def load_state(self, state):
        self.at = state["at"]


flow = fl.Flow("faults")
counter = flow.worker(Counter)
if KIND == "op":
    reward = flow.worker(Custom, name="reward")
else:
    reward = flow.worker(
        fl.FunctionReward,
        {"row": row, "async": awaited, "batched": batched}[KIND],
        batched=KIND == "batched",
        timeout=float(os.environ.get("TIMEOUT", "0.5")),
        on_error=os.environ.get("ON_ERROR", "raise"),
        tokenizer=lambda: None,
        name="reward",
    )


@flow.program
def faults(steps: int = 3):
    for step, batch in flow.steps(Rows(), steps):
        batch = reward.score(batch)
        if os.environ.get("ON_ERROR") == "mark":
            batch = batch.filter(~batch.failed)
        flow.log(step, counter.update(batch), reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
