"""Episodes of a call that is killed: those that were over are not played again, whoever goes on with the run."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest
from answers_run import Run, run_here, wait_for
from flows import metrics

from flowrl.analysis.run_difference import CLOCKED
from flowrl.runtime.storage.run_lock import began

ENDED = {0, 1, 3, 4, 6}  # prompts whose two episodes are over when those of 7 wait at their second turn
PLAN = """
cluster: {device: cpu, nodes: 1, devices_per_node: 1}
pools: {a: {devices: [0]}, b: {processes: PROCESSES}}
place: {actor: {pool: a}, game: {pool: b}}
"""


def digest(out):
    return json.loads((out / "run.json").read_text())["weights_digest"]


@pytest.fixture
def plans(tmp_path):
    for count in (1, 2):
        (tmp_path / f"plan{count}.yaml").write_text(PLAN.replace("PROCESSES", str(count)))
    return {1: str(tmp_path / "plan1.yaml"), 2: str(tmp_path / "plan2.yaml")}


def values(out):
    return [{n: v for n, v in line.items() if n.split("/")[-1] not in CLOCKED} for line in metrics(out)]


def start(folder, *words):
    return Run(folder, *words, driver="episodes_driver.py")


def to_its_end(monkeypatch, folder, runtime, *words):
    if runtime == "local":
        run_here(monkeypatch, folder, *words, driver="episodes_driver.py")
    else:
        assert start(folder, *words).process.wait(300) == 0, (folder / "said").read_text()


def begun(run, *before):
    """How often an episode of each prompt was begun."""
    return Counter(int(x) for x, _ in run.calls("begin")) - sum(before, Counter())


@pytest.mark.parametrize(
    ("runtime", "who"),
    [("local", "driver"), *(pytest.param("ray", w, marks=pytest.mark.nightly) for w in ("driver", "rank", "both"))],
)
def test_episodes_that_were_over_in_a_call_that_is_killed_are_not_played_again(
    one_thread, tmp_path, monkeypatch, plans, runtime, who
):
    if runtime == "ray":
        pytest.importorskip("ray", reason="the extra [ray] is not installed")
    words = ["--runtime", runtime, *(["--plan", plans[1]] if runtime == "ray" else [])]
    (tmp_path / "calm").mkdir()
    (tmp_path / "calm" / "go").touch()
    to_its_end(monkeypatch, tmp_path / "calm", runtime, *words)
    run = start(tmp_path, *words)
    run.until(lambda: run.answered() >= ENDED and any(x == 7 for x, _ in run.calls("step")))
    first = begun(run)
    assert set(first.values()) == {2}
    if who != "driver":
        os.kill(next(pid for x, pid in run.calls("step") if x == 7), signal.SIGKILL)
    if who != "rank":
        run.process.kill()
        run.process.wait()
        ranks = {pid for _, pid in run.calls("begin")}  # they end a moment later, and would play on until then
        wait_for(lambda: not any(began(pid) for pid in ranks))
        (tmp_path / "go").touch()
        other = ["--plan", plans[2]] if who == "both" else []  # other processes
        to_its_end(monkeypatch, tmp_path, runtime, "--resume", *other)
    else:
        (tmp_path / "go").touch()
        assert run.process.wait(300) == 0, (tmp_path / "said").read_text()
    again = begun(run, first)
    assert {x for x in again if x < 8} <= {2, 5, 7} and again[7] == 2
    assert {x: n for x, n in again.items() if x >= 8} == dict.fromkeys(range(8, 16), 2)
    if who != "both":  # of two processes rows are sampled among those of the other: bits may differ, episodes do not
        assert values(tmp_path / "run") == values(tmp_path / "calm" / "run")
        assert digest(tmp_path / "run") == digest(tmp_path / "calm" / "run")
