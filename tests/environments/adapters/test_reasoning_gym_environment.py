"""Tasks of reasoning-gym: an answer of a policy is worth what the package itself gives for it."""

from __future__ import annotations

import sys

import pytest
from real_package import expect_trained, packages, said_by

from flowrl.environments import ReasoningGymEnvironment
from flowrl.errors import WorkerError


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return said_by("reasoning_gym_play.py", packages("reasoning-gym", tmp_path_factory.mktemp("site")))


@pytest.mark.nightly
@pytest.mark.parametrize("dataset", ["chain_sum", "isomorphic_strings"])
def test_rewards_are_those_of_the_package_for_the_same_answers(found, dataset):
    rows = found[dataset]["rows"]
    assert len(rows) == 48 and found[dataset]["delivered"] == 1
    for row in rows:
        assert row["outcome"] == "finished" and row["reason"] == "done"
        assert row["reward"] == row["scores"]["score"] == pytest.approx(row["theirs"])
    assert {row["reward"] for row in rows} >= {0.0, 1.0}


@pytest.mark.nightly
def test_an_entry_is_scored_elsewhere_as_where_it_was_made_in_every_data_set(found):
    assert found["alike"]["bad"] == [] and found["alike"]["tried"] >= 300


@pytest.mark.nightly
def test_the_program_of_the_page_trains(found):
    expect_trained(found["page"])


@pytest.mark.nightly
def test_what_the_package_does_not_know_is_refused_with_what_helps(found):
    name, option, value = found["refused"]
    assert "no data set 'chain_sun'" in name and "Did you mean 'chain_sum'?" in name
    assert "'max_trems'" in option and "fields of ChainSumConfig" in option
    assert "size must be positive" in value


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(WorkerError, match="needs the package reasoning_gym") as refused:
        ReasoningGymEnvironment("chain_sum").rows()
    assert refused.value.fix == "pip install 'flowrl-lm[reasoning-gym]'."
