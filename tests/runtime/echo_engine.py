"""An engine that only generates: it answers each prompt with the prompt's own tokens. It has no weights and no model.

All that flowrl has to be told of it is ROW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.backends import open_tokenizer
from flowrl.batch import Column
from flowrl.placement.backends import Backend
from flowrl.workers.model_options import Build, Sampled, Sampling

ROW = Backend(
    "echo",
    "answers with the prompt",
    module=__name__,
    generates=True,
    logprobs=("raw", "processed"),
)


class Echo:
    """``open_engine(Build(Model("folder")))``: of the model it needs the tokenizer alone."""

    def __init__(self, build: Build) -> None:
        self._tokenizer = open_tokenizer(build.model)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def positions(self) -> int | None:
        return None

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` times the first ``max_tokens`` tokens of each prompt, of which it is sure: log-probabilities of 0."""
        rows = [row.tolist()[: sampling.max_tokens] for row in prompts for _ in range(n)]
        ids = Column.of(rows, "response", "i32")
        sure = Column.of([[0.0] * len(row) for row in rows], "response", "f32")
        whole = [len(row) for row in prompts for _ in range(n)]
        ended = torch.tensor([size <= sampling.max_tokens for size in whole])
        return Sampled(ids, sure, sure, ended, sampling.row_temperature)


def open_engine(build: Build) -> Echo:
    """Return an engine that echoes."""
    return Echo(build)
