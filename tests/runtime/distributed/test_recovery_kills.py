"""Processes of a run killed at every point, as benchmarks/kills.py does it: recovered in time, with the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import disturbed
import kills
import leftovers

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, of Linux")

#: Six processes in one stroke, one in a publish, and one that trains in an update. `make nightly` kills three hundred.
EIGHT = ["all", "publish", "update"]


def test_shared_memory_that_is_left_is_told_and_that_of_a_browser_is_not():
    there, made = leftovers.shared_memory(), [leftovers.SHARED / f"{dot}flowrl-test-{os.getpid()}" for dot in ("", ".")]
    try:
        for file in made:
            file.touch()
        said = leftovers.left_behind("no process", there, seconds=0.0)
    finally:
        for file in made:
            file.unlink()
    assert f"shared memory {made[0].name}" in said.split(", ") and made[1].name not in said


def test_a_rank_that_the_run_has_ended_with_the_first_is_hit_too():
    """It ends a pool as one of its ranks dies, which may be before the next one is struck."""
    there = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run: Any = SimpleNamespace(step_seconds=lambda: 0.0, pid={0: there.pid, 1: gone.pid}.get)
    disturbed.at_any_time(run, random.Random(0), [0, 1])
    assert there.wait(30) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        disturbed.at_any_time(run, random.Random(0), [1])


@pytest.mark.slow
def test_eight_processes_are_killed():
    """A step comes three to fifteen seconds after a fault; the limit is for a machine that does much besides."""
    words = ["--limit", "60", "--deadline", "120", "--seconds", "600"]
    assert kills.main(["--kinds", ",".join(EIGHT), "--faults", "8", *words]) == 0


@pytest.mark.nightly
def test_whoever_dies_in_a_publish_costs_ten_seconds():
    """Senders, receivers and process 0 of the wire: before, during and after each thing that a publish does."""
    assert kills.main(["--each", "--kinds", "publish", "--limit", "10"]) == 0


@pytest.mark.nightly
def test_nothing_grows_in_a_hundred_renewals():
    assert kills.main(["--kinds", "renew", "--faults", "100"]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", ["0", "1", "4"])
def test_replicas_are_killed_and_no_row_is_lost_or_there_twice(staleness):
    words = ["--kinds", "call,rank,renew,driver", "--faults", "8", "--copies", "2", "--limit", "60"]
    assert kills.main([*words, "--staleness", staleness]) == 0


@pytest.mark.nightly
def test_short_runs_are_killed_in_all_settings(tmp_path):
    """A setting after the other; a second call goes on where the first one ended."""
    record = tmp_path / "kills.jsonl"
    words = ["--faults", "2", "--kinds", "driver,pause", "--runtime", "local", "--staleness", "0,1,4"]
    words += ["--publish", "drain,interrupt", "--order", "fifo,window", "--program", "plain,refill,evaluate"]
    words += ["--limit", "60", "--record", str(record)]
    assert kills.main([*words, "--total", "8"]) == 0
    assert kills.main([*words, "--total", "38"]) == 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    settings = [tuple(line[name] for name in ("staleness", "publish", "order", "program")) for line in lines]
    assert len(set(settings)) == len(settings) == 19, "each setting once"
    assert not any(line["wrong"] for line in lines)


@pytest.mark.slow
def test_a_driver_is_killed_while_groups_are_exchanged():
    """In one process: no row is lost, trained on twice, too old or asked twice."""
    words = ["--faults", "1", "--kinds", "driver", "--runtime", "local", "--staleness", "4", "--publish", "interrupt"]
    assert kills.main([*words, "--order", "window", "--limit", "120", "--seconds", "600"]) == 0
