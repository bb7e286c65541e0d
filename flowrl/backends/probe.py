"""Rows that show by their log-probabilities which weights an engine computes with, where it is in another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..batch import Batch, Column

ROWS, TOKENS = 4, 24
#: By dtype: the largest difference of a log-probability that rounding may make.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.4}


def probe_rows(vocabulary: int, positions: int | None) -> list[list[int]]:
    """Return the fixed rows, of tokens over the whole vocabulary; the same in every process."""
    tokens = min(TOKENS, (positions or TOKENS + 1) - 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (ROWS, tokens), generator=generator).tolist()


def expected(engine: Any, rows: Sequence[list[int]]) -> list[list[float]]:
    """Return what a training engine gives for each token of the rows but the first."""
    mask = [[True] * (len(row) - 1) for row in rows]
    batch = Batch.of(
        tokens=Column.of([list(row) for row in rows], "token", "i32"),
        response_mask=Column.of(mask, "response", "bool"),
    )
    return engine.logprobs(batch).to_list()
