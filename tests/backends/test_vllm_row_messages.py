"""Rows as they go from vLLM's process: all of their fields, without a copy of each token."""

from __future__ import annotations

from array import array
from dataclasses import asdict, replace

import pytest

from flowrl.backends.vllm.row_messages import as_message, from_message
from flowrl.workers.streaming import SampledRow
from flowrl.workers.tokens.row_support import RowSupport

ROW = SampledRow(1, 0, (5, 7), (-0.5, -1.0), (-0.1, -0.2), ((0, 1), (3, 1)), "stop")
SUPPORT = RowSupport(array("i", [5, 7, 8]), array("i", [2, 1]))


@pytest.mark.parametrize("row", [ROW, replace(ROW, reason="aborted", ids=(), rollout_logprobs=(), versions=())])
def test_a_message_is_what_the_row_has(row):
    assert as_message(row) == asdict(row)
    assert as_message(row)["ids"] is row.ids, "no token is copied"


@pytest.mark.parametrize("support", [None, SUPPORT])
def test_a_row_comes_back_as_it_was(support):
    row = replace(ROW, support=support)
    assert from_message(as_message(row)) == row and row.support == support
