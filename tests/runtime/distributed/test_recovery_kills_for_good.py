"""Replicas of a run killed, as benchmarks/kills.py does it, and not waited for: it goes on with fewer, and others come."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import disturbed
import kills

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, of Linux")


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", ["0", "1"])
def test_replicas_are_lost_for_good_and_others_come(staleness):
    """The same rows are trained on, up to how sums are rounded."""
    words = ["--kinds", "gone,call,driver", "--restart", "0", "--faults", "5", "--limit", "60"]
    assert kills.main([*words, "--staleness", staleness]) == 0


def test_numbers_of_other_replicas_are_compared_up_to_rounding():
    calm = [{"step": 0, "loss": 0.5, "reward": 1.0}]
    near, far = [{**calm[0], "loss": 0.50001}], [{**calm[0], "reward": 1.25}]
    assert kills.alike(calm, calm, elastic=False) and not kills.alike(calm, near, elastic=False)
    assert kills.alike(calm, near, elastic=True) and not kills.alike(calm, far, elastic=True)
    assert not kills.alike(calm, [], elastic=True) and not kills.alike(calm, [{"step": 0}], elastic=True)


def test_a_replica_that_is_gone_is_asked_for_where_nobody_waits_alone():
    with pytest.raises(SystemExit):
        kills.main(["--kinds", "gone"])


def test_who_comes_in_the_place_of_one_that_is_gone_has_its_number(tmp_path):
    """Ranks of a pool in their order are those of the plan; a pool is whole again once the run says so."""
    run = object.__new__(disturbed.Disturbed)
    run.out = tmp_path
    where = {0: "train", 1: "train", 3: "rollout", 4: "rewards", 5: "rewards", 6: "rollout"}
    ranks = ", ".join(f'"{rank}": {{"pool": "{pool}", "pid": {rank}}}' for rank, pool in where.items())
    (tmp_path / "ranks.json").write_text(f"{{{ranks}}}")
    assert [run.number(rank) for rank in disturbed.RANKS] == [0, 1, 3, 6, 4, 5] and run.pid(3) == 6
    said = [
        "pool 'rollout' goes on with 1 rank: rank 2 could not be started again within 0 s",
        "pool 'rollout' has all its ranks: rank 6 has come",
    ]
    file = tmp_path / "events.jsonl"
    whole = [run.is_whole()]
    for text in said:
        with file.open("a") as lines:
            lines.write(f'{{"kind": "resized", "time": 1.0, "text": "{text}"}}\n')
        whole.append(run.is_whole())
    assert whole == [True, False, True]
