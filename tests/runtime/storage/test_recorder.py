"""The lines of a reward curve, and what rows that are written down say of a cache that was kept."""

from __future__ import annotations

import json

import pytest

import flowrl as fl
from flowrl.analysis import gap
from flowrl.marks import marks
from flowrl.runtime.storage.recorder import Recorder, curves


def test_each_loop_of_a_program_is_a_line_of_its_own():
    def lines(program, *rewards):
        return [{"program": program, "step": step, "reward": reward} for step, reward in enumerate(rewards)]

    history = [
        *lines("warmup", 0.1),
        *lines("train", 0.1, 0.2),
        *lines("train", 0.3, 0.4, 0.5),
        *lines("test", 0.9, 1.0),
    ]
    assert curves(history) == [
        ("train, loop 1", [0, 1], [0.1, 0.2]),
        ("train, loop 2", [0, 1, 2], [0.3, 0.4, 0.5]),
        ("test", [0, 1], [0.9, 1.0]),
    ]


def test_a_step_without_a_reward_is_left_out_also_before_it_was_written_and_read_again():
    rewards = (0.5, float("nan"), None, 0.75)
    history = [{"program": "train", "step": step, "reward": reward} for step, reward in enumerate(rewards)]
    assert curves([*history, {"program": "train", "step": 4}]) == [("train", [0, 3], [0.5, 0.75])]


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
