"""The proof that an engine computes with the weights that were published: their digest, and what they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import RunError
from ...workers.weights.weight_boxes import Shard

ROWS, TOKENS = 4, 24  # of the probe
#: By dtype: the largest difference of a log-probability that rounding may make.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}


def whole(weights: Mapping[str, Tensor]) -> list[Shard]:
    """Return whole weights as boxes."""
    return [Shard(name, tuple(w.shape), (0,) * w.dim(), w) for name, w in weights.items()]


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


def check_proof(
    what: str, said: Mapping[str, Any], *, digest: str, wanted: Sequence[Sequence[float]], dtype: str
) -> float:
    """Return the largest difference of a log-probability. Raises RunError, which names what does not agree."""
    if said["lacking"]:
        few = ", ".join(said["lacking"][:3])
        raise RunError(
            f"{what}: vLLM has weights that were not among those published, such as {few}.",
            fix="Use a kind of model that docs/engines.md names.",
        )
    if said["digest"] != digest:
        raise RunError(
            f"{what} came to vLLM with other numbers: digest {said['digest'][:12]}, not {digest[:12]}.",
            fix="This is a fault of the transport; report it with the plan.",
        )
    allowed = TOLERANCE[dtype]
    gaps = [[_gap(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(said["probe"], wanted, strict=True)]
    worst, row, token = max((gap, r, t) for r, mine in enumerate(gaps) for t, gap in enumerate(mine))
    if worst > allowed:
        there, here = said["probe"][row][token], wanted[row][token]
        raise RunError(
            f"{what}: the weights came whole, and vLLM computes with others: token {token + 1} in row {row} of the "
            f"probe has a log-probability of {there:.4f} there and of {here:.4f} by the weights, {worst:.2g} apart; "
            f"{allowed:g} is allowed.",
            fix="A copy of weights inside vLLM was not replaced; report it with the model's configuration.",
        )
    return worst


def _gap(there: float, here: float) -> float:
    """How far two numbers are apart: without end where one is none."""
    gap = abs(there - here)
    return inf if isnan(gap) else gap
