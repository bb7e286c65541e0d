"""Tasksets of verifiers 0.4: what a policy plays in them is worth what the package itself says of the same answers."""

from __future__ import annotations

import sys

import pytest
from real_package import expect_trained, installed, packages, said_by, started

from flowrl.environments import TasksetEnvironment
from flowrl.errors import WorkerError

nightly = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return said_by("taskset_play.py", packages("verifiers-tasksets", tmp_path_factory.mktemp("site"), "uv"))


def programs_run(found, how):
    """Rows that were played; the test is skipped where uv, which verifiers has start a program, gets no packages."""
    rows = found[how]["rows"]
    if how in ("program", "shell") and all("failed to prepare uv script" in (row["why"] or "") for row in rows):
        pytest.skip(f"uv gets no packages here: {rows[0]['why']}")
    return rows


class TestPlayed:
    pytestmark = nightly

    @pytest.mark.parametrize("how", ["alone", "talk", "tools", "program"])
    def test_rewards_metrics_and_ends_are_those_of_verifiers_for_the_same_answers(self, found, how):
        rows = programs_run(found, how)
        assert len(rows) >= 12 and found[how]["delivered"] == 1
        for row in rows:
            assert row["outcome"] == "finished" and row["theirs"]["ok"] and row["reason"] == row["theirs"]["reason"]
            assert row["reward"] == pytest.approx(row["theirs"]["reward"])
            own = {name: value for name, value in row["scores"].items() if name not in ("calls", "forks")}
            assert own == pytest.approx(row["theirs"]["scores"])
            assert row["scores"]["calls"] == len(row["texts"]) and row["scores"]["forks"] == 0
        assert len({row["reward"] for row in rows}) > 1
        assert ({len(row["texts"]) for row in rows} == {1}) == (how in ("alone", "program"))
        assert any(row["scores"].get("seen") for row in rows) == (how == "tools")

    def test_a_program_of_verifiers_has_tools_of_its_own(self, found):
        rows = programs_run(found, "shell")
        assert {row["outcome"] for row in rows} == {"finished"} and {len(row["texts"]) for row in rows} > {1}
        for row in rows:
            assert row["scores"]["calls"] == len(row["texts"]) and row["scores"]["forks"] == 0
            assert all("echo" in text for text in row["texts"][:-1]) and "echo" not in row["texts"][-1]

    def test_a_limit_of_the_rollout_ends_an_episode_and_verifiers_grades_it_as_far_as_it_came(self, found):
        cut = [row for row in found["cut"]["rows"] if row["outcome"] == "truncated_turns"]
        assert cut
        for row in cut:
            assert row["reason"] == "turns" and len(row["texts"]) == 1 and row["scores"]["turns"] == 1
            letter = "abcd"[row["task"]["task"]]
            first = 2.0 * (row["texts"][0][:1] == letter)
            assert row["reward"] == pytest.approx(0.25 + first + 0.5 * row["texts"][0].count(letter))

    def test_the_seconds_of_the_rollout_end_an_episode_that_waits_and_verifiers_grades_it(self, found):
        for row in found["slow"]["rows"]:
            assert (row["outcome"], row["reason"], row["texts"]) == ("truncated_wall", "time", [])
            assert row["reward"] == 0.0 and row["scores"]["length"] == 0

    def test_a_reward_that_fails_fails_the_episode_without_a_reward(self, found):
        for row in found["broken"]["rows"]:
            failed = any("c" in text for text in row["texts"])
            assert (row["outcome"] == "environment_failure") == failed == (row["reward"] != row["reward"])
            assert ("this reward is broken" in row["why"]) == failed

    def test_the_program_of_the_page_trains(self, found):
        expect_trained(found["page"])

    def test_what_cannot_be_played_here_is_refused_with_the_reason(self, found):
        name, option, boxed, endless, program = found["refused"]
        assert "the harness 'mini_swe_agent' of verifiers needs a container" in program
        assert "'leters_taskset' cannot be loaded" in name and "kid" in option
        assert "task 0 of 'letters_taskset' needs a container" in boxed
        assert "tasks without end" in endless and "Write tasks=" in endless


@pytest.fixture(scope="module")
def echoed(tmp_path_factory):
    """A server of OpenEnv has its own packages; verifiers pins an mcp that needs another fastmcp beside the client."""
    server = packages("openenv", tmp_path_factory.mktemp("openenv"))
    verifiers = packages("verifiers-tasksets", tmp_path_factory.mktemp("verifiers"))
    own = ["--no-deps", "openenv>=0.10,<0.11", "fastmcp==4.0.*", "fastmcp-slim==4.0.*"]
    client = installed("openenv-client", tmp_path_factory.mktemp("client"), own)
    with started("echo_server.py", server) as url:
        return said_by("openenv_taskset_play.py", verifiers, url, str(client), str(server))


class TestOneOfVerifiersOwn:
    """The taskset `openenv` of the package, which no line of was written here, against the example server of OpenEnv."""

    pytestmark = nightly

    def test_the_reward_is_what_the_server_gives_openenvs_own_client_for_the_same_answers(self, echoed):
        rows = echoed["played"]["rows"]
        assert len(rows) == 8 and echoed["played"]["delivered"] == 1
        for row in rows:
            assert row["reward"] == pytest.approx(sum(row["theirs"])) and 1 <= len(row["texts"]) <= 3
            assert row["scores"]["openenv_reward"] == pytest.approx(row["reward"]) and row["scores"]["forks"] == 0
            assert row["outcome"] in ("finished", "truncated_turns"), row["why"]
        assert len({row["reward"] for row in rows}) > 2

    def test_the_program_of_the_page_trains(self, echoed):
        expect_trained(echoed["page"])


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(WorkerError, match="needs the package verifiers") as refused:
        TasksetEnvironment("gsm8k-v1").rows()
    assert refused.value.fix == "pip install 'flowrl-lm[verifiers-tasksets]'."
