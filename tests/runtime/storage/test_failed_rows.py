"""How many rows may fail is counted over a whole call, in whichever pieces and processes its rows are."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flows import metrics

from flowrl.errors import RewardError
from flowrl.placement.plan.plan import Pipeline, Plan

HERE = Path(__file__).parents[1]


@pytest.fixture
def flow(tmp_path, monkeypatch):
    monkeypatch.setenv("ANSWERS", str(tmp_path))
    import answers_driver
    import failing_driver

    importlib.reload(answers_driver)
    return importlib.reload(failing_driver).flow


def fail(folder, rows):
    (folder / "failing").write_text(json.dumps(list(rows)))


def asked(folder):
    """The rows that were asked for since the last look."""
    found = [float(line.split()[1]) for line in (folder / "calls").read_text().splitlines()]
    (folder / "calls").unlink()
    return sorted(found)


def warnings(folder):
    found = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in found if event["kind"] == "warning"]


def pieces(folder):
    lines = [json.loads(line) for line in (folder / "run" / "timeline.jsonl").read_text().splitlines()]
    return [line["rows"] for line in lines if line["node"] == "reward.score"]


def plan(chunks):
    return Plan({"main": "cpu"}, pipeline=Pipeline(chunks=chunks))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_piece_whose_rows_all_fail_does_not_stop_a_call_whose_others_do_not(flow, tmp_path, chunks):
    fail(tmp_path, range(8))
    flow.run(out=tmp_path / "run", runtime="local", plan=plan(chunks), quiet=True)
    assert pieces(tmp_path) == [16 // chunks] * chunks and metrics(tmp_path / "run")[0]["kept"] == 8
    [warning] = warnings(tmp_path)
    assert warning.startswith(
        "reward.score of step 0: score failed for 8 of 16 rows: OSError: no answer to 0 (row 0); "
    )


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_too_many_rows_stop_a_call_also_where_few_are_in_each_piece(flow, tmp_path, runtime):
    wrong = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]
    fail(tmp_path, wrong)
    how = {"runtime": runtime, "quiet": True} | ({"plan": plan(4)} if runtime == "local" else {})
    with pytest.raises(RewardError, match=r"score failed for 12 of 16 rows; max_failed is 0.5. First row 0: OSError"):
        flow.run(out=tmp_path / "run", **how)
    assert asked(tmp_path) == list(range(16))
    fail(tmp_path, [])
    flow.run(out=tmp_path / "run", resume=True, **how)
    assert asked(tmp_path) == wrong, "they had no answer"
    assert metrics(tmp_path / "run")[0]["kept"] == 16


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_trajectories_have_the_rows_that_were_left_out_with_their_reasons(flow, tmp_path, runtime):
    fail(tmp_path, [1, 3, 9])
    flow.run(out=tmp_path / "run", runtime=runtime, trajectories=4, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    reasons = {line["key"][0]: line["failed_why"] for line in lines if line["failed"]}
    assert reasons == {1: "OSError: no answer to 1", 3: "OSError: no answer to 3"}, "of the first four prompts"
    assert {line["key"][0] for line in lines if not line["failed"]} >= {0, 2}


@pytest.mark.nightly
def test_processes_count_together(tmp_path):
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    (tmp_path / "plan.yaml").write_text(
        "cluster: {device: cpu, nodes: 1, devices_per_node: 1}\npools: {a: {processes: 2}}\nplace: {reward: {pool: a}}\n"
        "pipeline: {chunks: 2}\n"
    )

    def run(*words):
        command = [sys.executable, "-m", "flowrl", "run", str(HERE / "failing_driver.py"), "--quiet", "--out"]
        command += [str(tmp_path / "run"), "--runtime", "ray", "--plan", str(tmp_path / "plan.yaml"), *words]
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "ANSWERS": str(tmp_path), "PYTHONPATH": paths}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)

    wrong = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]
    fail(tmp_path, wrong)
    said = run().stderr
    assert "score failed for 12 of 16 rows; max_failed is 0.5." in said, said
    assert asked(tmp_path) == list(range(16))
    fail(tmp_path, [0, 1])
    said = run("--resume").stderr
    assert asked(tmp_path) == wrong, said
    [warning] = [text for text in warnings(tmp_path) if "failed for" in text]
    assert "failed for 2 of 16 rows" in warning and metrics(tmp_path / "run")[0]["kept"] == 14
