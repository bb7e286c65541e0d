"""Tokens of rows are counted as they were sampled: an agent's prompt is its own, not that of the data."""

from __future__ import annotations

from flowrl.batch import Batch, Column
from flowrl.runtime.storage.traffic import prompt_tokens


def test_the_prompt_of_a_row_is_what_stands_before_its_response():
    prompt = Column.of([[7], [7]], dim="prompt", dtype="i32")
    response = Column.of([[5], [5, 6]], dim="response", dtype="i32")
    tokens = Column.of([[1, 2, 3, 5], [5, 6]], dim="token", dtype="i32")
    assert prompt_tokens(Batch.of(2, prompt_ids=prompt, response_ids=response, tokens=tokens)) == [3, 0]
    assert prompt_tokens(Batch.of(2, prompt_ids=prompt)) == [1, 1]
    assert prompt_tokens(Batch.of(2, rewards=[0.0, 1.0])) == prompt_tokens(None) == []
