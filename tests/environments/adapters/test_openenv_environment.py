"""Servers of OpenEnv: what a policy plays there is worth what OpenEnv's own client is given for the same answers."""

from __future__ import annotations

import sys

import pytest
from real_package import expect_trained, packages, said_by

from flowrl.environments import OpenEnvEnvironment
from flowrl.errors import WorkerError

nightly = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return said_by("openenv_play.py", packages("openenv", tmp_path_factory.mktemp("site")))


class TestPlayed:
    pytestmark = nightly

    @pytest.mark.parametrize("game", ["echo", "counts"])
    def test_rewards_and_ends_are_those_of_the_server_for_the_same_answers(self, found, game):
        rows = found[game]["rows"]
        assert len(rows) == 12 and found[game]["delivered"] == 1
        for row in rows:
            assert row["turn_rewards"] == pytest.approx(row["theirs"]["rewards"])
            assert row["reward"] == pytest.approx(sum(row["theirs"]["rewards"]), abs=1e-5)
            assert row["theirs"]["done"] == [False] * (len(row["texts"]) - 1) + [game == "counts"]
            ends = (
                [("finished", "done")]
                if game == "counts"
                else [("truncated_turns", "turns"), ("truncated_tokens", "length")]
            )
            assert (row["outcome"], row["reason"]) in ends
            assert len(row["texts"]) == (row["task"]["task_seed"] + 1 if game == "counts" else 3)
        assert len({row["reward"] for row in rows}) > 2

    def test_an_answer_that_is_no_action_ends_the_episode(self, found):
        kinds = {row["texts"][0] for row in found["json"]["rows"]}
        assert {'{"message": "ab"}'} < kinds
        for row in found["json"]["rows"]:
            good = row["texts"][0] == '{"message": "ab"}'
            assert (row["reason"] != "no_action" or len(row["texts"]) == 2) if good else row["reason"] == "no_action"
            assert row["turn_rewards"][0] == pytest.approx(0.2 if good else 0.0)

    def test_a_server_without_room_is_a_failure_and_no_reward(self, found):
        outcomes = [row["outcome"] for row in found["full"]["rows"]]
        cut = {"truncated_turns", "truncated_tokens"}
        assert "infrastructure_failure" in outcomes and set(outcomes) <= {"infrastructure_failure", *cut}
        for row in found["full"]["rows"]:
            if row["outcome"] == "infrastructure_failure":
                assert row["reward"] != row["reward"] and "CAPACITY_REACHED" in row["why"]

    def test_an_environment_that_its_seed_does_not_decide_fails(self, found):
        assert {row["outcome"] for row in found["forgets"]["rows"]} == {"environment_failure"}
        assert all("it began with" in row["why"] for row in found["forgets"]["rows"])

    def test_the_program_of_the_page_trains(self, found):
        expect_trained(found["page"])

    def test_an_address_or_a_field_that_is_not_there_is_refused(self, found):
        away, field = found["refused"]
        assert "http://127.0.0.1:9 plays nothing" in away and "Start a server there" in away
        assert "KeyError('no')" in field


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(WorkerError, match="needs the package openenv") as refused:
        OpenEnvEnvironment("http://127.0.0.1:9").rows()
    assert refused.value.fix == "pip install 'flowrl-lm[openenv]'."
