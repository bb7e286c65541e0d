"""Environments of verifiers: what a policy plays in them is worth what the package itself says of the same answers."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from flowrl.environments import VerifiersEnvironment
from flowrl.errors import WorkerError

GAME = Path(__file__).with_name("verifiers_game.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the package and flowrl say; it is installed beside the other packages, as it brings sixty of its own."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "verifiers==0.3.1"]
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip("the package index gives no verifiers")
    done = subprocess.run([sys.executable, str(GAME), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["alone", "groups", "tools"])
def test_rewards_metrics_and_ends_are_those_of_verifiers_for_the_same_answers(found, how):
    assert len(found[how]["rows"]) == len(found[how]["theirs"]) >= 12 and found[how]["delivered"] == 1
    for row, theirs in zip(found[how]["rows"], found[how]["theirs"], strict=True):
        assert row["outcome"] == "finished" and row["reason"] == theirs["reason"]
        assert row["reward"] == pytest.approx(theirs["reward"])
        own = {name: value for name, value in row["scores"].items() if name not in ("calls", "forks")}
        assert own == pytest.approx(theirs["scores"])
        assert row["scores"]["calls"] == len(row["texts"]) and row["scores"]["forks"] == 0
    assert len({row["reward"] for row in found[how]["rows"]}) > 3
    assert ("spread" in found[how]["rows"][0]["scores"]) == (how == "groups")
    assert any(row["scores"].get("total_tool_calls", 0) > 1 for row in found[how]["rows"]) == (how == "tools")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_limit_of_the_rollout_ends_an_episode_and_verifiers_grades_it_as_far_as_it_came(found):
    cut = [(i, row) for i, row in enumerate(found["cut"]["rows"]) if row["outcome"] == "truncated_turns"]
    assert cut
    for place, row in cut:
        assert row["reason"] == "turns" and len(row["texts"]) == 1
        length = len(row["texts"][0]) + place // 3
        assert row["scores"] == {"calls": 1, "forks": 0, "length": length, "messages": 1, "num_turns": 1}
        assert row["reward"] == 0.5 * length + 2.0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_policy_is_trained_on_the_tokens_that_it_sampled(found):
    assert found["trained"]["gap"] < 1e-3 and found["trained"]["gradient"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_error_of_the_environment_is_a_failure_without_a_reward(found):
    failed, fine = ("infrastructure_failure", True), ("finished", False)
    outcomes = {(row["outcome"], row["reward"] != row["reward"]) for row in found["breaks"]["rows"]}
    assert failed in outcomes and outcomes <= {failed, fine}, "an episode that ends before a reply has one"


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(WorkerError, match="neither 'train' nor 'eval'"):
        VerifiersEnvironment("wordle", split="test")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(WorkerError, match="needs the package verifiers"):
        VerifiersEnvironment("wordle").rows()
    later = types.ModuleType("verifiers")
    later.__version__ = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", later)
    with pytest.raises(WorkerError, match=r"verifiers 0\.4\.0 has no load_environment"):
        VerifiersEnvironment("wordle").rows()
