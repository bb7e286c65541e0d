"""Environments of Aviary: what a policy plays in them is worth what the package itself says of the same answers."""

from __future__ import annotations

import sys

import pytest
from real_package import expect_trained, packages, said_by

from flowrl.environments import AviaryEnvironment
from flowrl.errors import WorkerError

nightly = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return said_by("aviary_play.py", packages("aviary", tmp_path_factory.mktemp("site"), "aviary.gsm8k"))


class TestPlayed:
    pytestmark = nightly

    @pytest.mark.parametrize("game", ["sums", "stories", "endless"])
    def test_rewards_and_ends_are_those_of_aviary_for_the_same_answers(self, found, game):
        rows = found[game]["rows"]
        assert len(rows) >= 12 and found[game]["delivered"] == 1
        for row in rows:
            assert row["turn_rewards"] == pytest.approx(row["theirs"]["rewards"]), row
            assert row["reward"] == pytest.approx(sum(row["theirs"]["rewards"]), abs=1e-5)
            *before, last = row["theirs"]["ends"]
            assert not any(before), "nothing is sampled after the end"
            assert row["reason"] == last if last else row["reason"] in ("turns", "length"), row
            calls = [text.count("<tool_call>") for text in row["texts"]]
            assert row["scores"]["tool_calls"] == sum(calls)
        assert len({row["reward"] for row in rows}) > 1 and len({len(row["texts"]) for row in rows}) > (
            game == "endless"
        )

    def test_a_call_that_no_tool_takes_is_an_invalid_one(self, found):
        wrong = [row for row in found["sums"]["rows"] if row["scores"]["bad_tool_calls"]]
        assert wrong
        for row in wrong:
            assert row["reason"] == "done" and row["turn_rewards"][-1] == -1.0

    def test_an_environment_that_begins_otherwise_fails(self, found):
        for row in found["forgets"]["rows"]:
            assert row["outcome"] == "environment_failure" and "it began with" in row["why"]

    def test_the_program_of_the_page_trains(self, found):
        expect_trained(found["page"])

    def test_what_cannot_be_played_is_refused_with_the_reason(self, found):
        name, endless, option, mixed = found["refused"]
        assert "aviary has nothing named 'gsm8'" in name and "Did you mean 'gsm8k'?" in name
        assert "tasks without end" in endless and "Write tasks=" in endless
        assert "'gsm8k' cannot be made" in option and "splt" in option
        assert "task 1 of '' has other tools than task 0" in mixed


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aviary", None)
    monkeypatch.setitem(sys.modules, "aviary.env", None)
    with pytest.raises(WorkerError, match="needs the package aviary") as refused:
        AviaryEnvironment("gsm8k", split="train").rows()
    assert refused.value.fix == "pip install 'flowrl-lm[aviary]'."
