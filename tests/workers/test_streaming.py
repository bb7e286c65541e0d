"""What an engine is asked for: as many seeds and starts as rows, and rows that are kept as they can go on."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

import flowrl as fl
from flowrl.errors import DataError
from flowrl.testing import SampledRow, SampleRequest, Sampling
from flowrl.workers.tokens.row_support import RowSupport


def request(rows=2, n=2, seeds=4, starts=None, **how):
    prompts = fl.Column.of([[3 + row] for row in range(rows)], dim="prompt", dtype="i32")
    return SampleRequest(prompts, n, torch.arange(seeds), Sampling(max_tokens=8), starts, **how)


def test_rows_are_the_prompts_times_n_and_begin_at_their_starts():
    asked = request()
    assert asked.rows == 4 and asked.row_starts == [0, 0, 0, 0]
    assert request(starts=torch.tensor([0, 3, 1, 2])).row_starts == [0, 3, 1, 2]
    assert request(rows=0, seeds=0).row_starts == [] and request(rows=0, seeds=0).kept_rows() == {}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"seeds": 3}, "3 seeds for 4 rows"),
        ({"n": 3}, "4 seeds for 6 rows"),
        ({"rows": 0}, "4 seeds for 0 rows"),
        ({"starts": torch.zeros(5, dtype=torch.int64)}, "5 starts for 4 rows"),
    ],
)
def test_each_row_has_one_of_its_own(how, said):
    with pytest.raises(DataError, match=said):
        request(**how)


ROW = SampledRow(1, 2, (5, 7), (-0.5, -1.2), (-0.5, -1.2), ((3, 2),), "aborted")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([replace(ROW, row=4)], "Row 4 of the rows that are kept is not among the 4 rows"),
        ([replace(ROW, row=-1)], "Row -1 .* is not among"),
        ([ROW, ROW], "Row 2 .* is there twice"),
        ([replace(ROW, versions=((3, 1),))], r"has 2 tokens, and log-probabilities and versions of \[1, 2\]"),
        ([replace(ROW, sampling_logprobs=())], r"has 2 tokens, and .* of \[0, 2\]"),
        (
            [replace(ROW, ids=(5,) * 8, rollout_logprobs=(0.0,) * 8, sampling_logprobs=(0.0,) * 8, versions=((3, 8),))],
            "has 8 tokens and has not ended; it has 8 at most",
        ),
    ],
)
def test_rows_that_cannot_go_on_are_named(kept, said):
    with pytest.raises(DataError, match=said):
        request(kept=kept).kept_rows()


def test_rows_that_can_go_on_are_known_by_their_numbers():
    ended = replace(ROW, row=0, reason="stop")
    assert request(kept=[ROW, ended]).kept_rows() == {2: ROW, 0: ended}


def test_rows_of_a_request_that_records_say_what_could_be_drawn():
    asked = request(kept=[ROW])
    recording = replace(asked, sampling=replace(asked.sampling, support=True))
    with pytest.raises(DataError, match="Row 2 .* does not say which tokens could be drawn"):
        recording.kept_rows()
    said = replace(ROW, support=RowSupport(array("i", [5, 6]), array("i", [2, 0])))
    assert replace(recording, kept=[said]).kept_rows() == {2: said}
