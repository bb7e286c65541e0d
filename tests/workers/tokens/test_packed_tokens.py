"""Token ids of rows are put together without padding."""

from __future__ import annotations

import pytest

from flowrl.workers.tokens.packed_tokens import pack


@pytest.mark.parametrize("rows", [[[5, 6], [], [7]], [[]], [], [[2**31 - 1], [0]], [(5, 6), (7,)]])
def test_rows_are_packed_as_they_are(rows):
    made = pack(iter(rows), "prompt")
    assert made.type == "i32[*prompt]" and made.to_list() == [list(row) for row in rows]
    assert made.lengths.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("wrong", [2**31, "a", None])
def test_what_is_no_token_id_is_not_packed(wrong):
    with pytest.raises((OverflowError, ValueError, TypeError)):
        pack([[5], [wrong]], "prompt")
