"""Replicas that sample without a model: an engine of the table ``replica``, whose responses have the length of the prompt.

``ENGINES`` are those that were opened, in the order of their ranks; ``FAULTS`` says what one of them answers wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.backends import open_tokenizer
from flowrl.placement.backends import Backend
from flowrl.workers.model_options import Build, Sampled
from tasks import arithmetic

ROW = Backend(
    "replica",
    "answers from a table",
    module=__name__,
    generates=True,
    logprobs=("raw", "processed"),
)
ENGINES: list[Replica] = []
FAULTS: dict[int, Callable[[Sampled], Sampled]] = {}
#: How long the responses to a prompt are, by its first digit.
LENGTHS = (40, 4, 3, 38, 36, 3, 2, 34)


class Replica(fl.testing.FakeEngine):
    """A fake engine whose rows are as long as their prompt says."""

    def __init__(self, build: Build) -> None:
        super().__init__(vocab=16, stop=(), token_seconds=1.0, tokenizer=open_tokenizer(build.model))
        self.asked: list[list[int]] = []  # first digits of the prompts of each call
        self.number = len(ENGINES)
        ENGINES.append(self)

    def generate(self, prompts: Any, n: int, seeds: Any, sampling: Any, starts: Any = None) -> Sampled:
        made = super().generate(prompts, n, seeds, sampling, starts)
        return FAULTS[self.number](made) if self.number in FAULTS else made

    def submit(self, request: fl.testing.SampleRequest) -> int:
        call = super().submit(request)
        self.asked.append([digit(prompt) for prompt in request.prompts.to_list()])
        for (number, _), row in self._rows.items():
            if number == call:
                row.limit = LENGTHS[digit(row.prompt)]
        return call


def digit(prompt: Any) -> int:
    """The first digit of a prompt, by its tokens."""
    return int(prompt[0]) - 1


def open_engine(build: Build) -> Replica:
    """Return an engine of a replica."""
    return Replica(build)


def with_row(made: Sampled, rows: list[int]) -> Sampled:
    """The rows of these numbers alone, in this order."""
    columns = {name: getattr(made, name).take(rows) for name in ("ids", "rollout_logprobs", "sampling_logprobs")}
    return replace(made, finished=made.finished[rows], **columns)


def with_number(made: Sampled, at: int, value: float) -> Sampled:
    """Another log-probability at one place."""
    wrong = made.rollout_logprobs.values.clone()
    wrong[at] = value
    return replace(made, rollout_logprobs=made.rollout_logprobs.with_values(wrong))


def with_versions(made: Sampled, versions: list[int]) -> Sampled:
    """Versions of tokens: these, and the last one on."""
    whole = torch.full((len(made.ids.values),), versions[-1], dtype=torch.int32)
    whole[: len(versions)] = torch.tensor(versions, dtype=torch.int32)
    return replace(made, versions=made.ids.with_values(whole))


def eight(batch: int = 8) -> fl.data.Source:
    """Eight prompts, all of one length, in the same order each time."""
    return fl.data.rows([{"prompt": f"{d}=", "answer": str(d)} for d in range(8)], batch=batch, shuffle=False)


flow = fl.Flow("replicas")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=None, max_tokens=50, name="actor")


@flow.program
def sampled(steps: int = 4):
    for step, batch in flow.steps(eight(), steps):
        batch = actor.generate(batch, n=2)
        flow.log(step, sure=batch.rollout_logprobs.row_mean().mean(), rows=batch.count())


SMALL = {**arithmetic.MODEL.config, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip
trained = fl.Flow("trained")
learner = trained.worker(fl.Actor, fl.Model(config=SMALL, tokenizer=arithmetic.build_tokenizer), lr=3e-3, max_tokens=8,
                         name="learner")  # fmt: skip
reward = trained.worker(fl.FunctionReward, lambda prompt, response: float(len(response)), name="reward")


@trained.program
def learn(steps: int = 6):
    for step, batch in trained.steps(eight(), steps):
        batch = rl.group_advantages(reward.score(learner.generate(batch, n=3)))
        trained.log(step, learner.update(batch, loss=rl.ppo_clip()), length=batch.response_mask.row_sum().mean())
