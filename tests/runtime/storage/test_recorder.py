"""What rows that are written down say of a cache that was kept."""

from __future__ import annotations

import json

import pytest

import flowrl as fl
from flowrl.analysis import gap
from flowrl.marks import marks
from flowrl.runtime.storage.recorder import Recorder


@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_went_on_with_keys_and_values_of_older_weights_say_so(tmp_path, kept):
    """Those of a call that kept them through a publish, where a turn has tokens of both versions; and no others."""
    versions = fl.Column.of([[3, 3], [3, 4], [3, 0, 4]], dim="response", dtype="i32")
    mask = [[True, True], [True, True], [True, False, True]]
    rows = fl.Batch.of(
        3,
        versions=versions.marked(marks(cache="kept")) if kept else versions,
        response_mask=fl.Column.of(mask, dim="response", dtype="bool"),
    )
    recorder = Recorder(tmp_path, groups=3, every=1)
    recorder.begin()
    recorder._trajectories("grpo", 5, rows, None)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert [line.get("cache") for line in lines] == [None, "kept" if kept else None, None]


def test_the_doctor_of_gaps_leaves_their_later_tokens_out():
    line = {
        "prompt_ids": [1],
        "tokens": [1, 5, 6, 7],
        "response_mask": [True] * 3,
        "versions": [3, 4, 4],
        "rollout_logprobs": [-1.0] * 3,
        "temperature": 1.0,
    }
    compared = gap._frozen(
        [line, {**line, "cache": "kept"}, {**line, "versions": [4] * 3, "cache": "kept"}], 4, ()
    ).compared
    assert compared.tolist() == [False, True, True, False, False, False, True, True, True]
