"""Rows that have left vLLM, as they go from its process to that which began it."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping
from typing import Any

from ...workers.streaming import SampledRow
from ...workers.tokens.row_support import RowSupport


def as_message(row: SampledRow) -> dict[str, Any]:
    """Return a row as JSON has it; ids that could be drawn are many, and go as their bytes."""
    told = dict(vars(row))  # dataclasses.asdict copies each token on its own
    if row.support is not None:
        told["support"] = [base64.b64encode(part).decode() for part in (row.support.ids, row.support.sizes)]
    return told


def from_message(said: Mapping[str, Any]) -> SampledRow:
    """Return the row of a message.

    >>> support = RowSupport(array("i", [5, 7]), array("i", [2]))
    >>> row = SampledRow(1, 0, (5,), (-0.5,), (-0.1,), ((0, 1),), "stop", support)
    >>> from_message(as_message(row)) == row
    True
    """
    support = said["support"]
    return SampledRow(
        said["call"],
        said["row"],
        tuple(said["ids"]),
        tuple(said["rollout_logprobs"]),
        tuple(said["sampling_logprobs"]),
        tuple((version, tokens) for version, tokens in said["versions"]),
        said["reason"],
        None if support is None else RowSupport(*(array("i", base64.b64decode(part)) for part in support)),
    )
