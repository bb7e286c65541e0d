"""``--set PATH=VALUE``: another value in the plan of a command, in its record, and at a resume."""

from __future__ import annotations

import json

import pytest

from flowrl.cli import main

PLAN = "pools:\n  main: {device: cpu}\npipeline: {chunks: 2}\n"


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return str(path)


def recorded(out):
    pipeline = json.loads((out / "run.json").read_text())["plan"].get("pipeline", {})
    return pipeline.get("staleness", 0), pipeline.get("chunks", 1)


def test_a_run_has_the_plan_as_changed_and_so_has_its_resume(evaluated_script, plan, tmp_path):
    out = tmp_path / "run"
    words = ["run", evaluated_script, "--out", str(out), "--quiet", "--plan", plan]
    assert main([*words, "--steps", "2", "--set", "pipeline.staleness=1", "--set=pipeline.chunks=4"]) == 0
    assert recorded(out) == (1, 4)
    resume = ["run", str(out), "--resume", "--quiet"]
    assert main([*resume, "--steps", "3"]) == 0
    assert recorded(out) == (1, 4)
    assert main([*resume, "--steps", "4", "--set", "pipeline.chunks=1"]) == 0
    assert recorded(out) == (1, 1)
    assert main([*resume, "--steps", "5", "--plan", plan]) == 0  # another plan is what it says
    assert recorded(out) == (0, 2)


def test_a_plan_that_was_not_named_can_be_changed(evaluated_script, capsys):
    assert main(["plan", evaluated_script, "--show", "--set", "pipeline.staleness=3"]) == 0
    assert "staleness 3" in capsys.readouterr().out
    assert (
        main(["check", evaluated_script, "--set", "pools.other={device: cpu}", "--set", "place.actr.pool=other"]) == 1
    )
    assert "actr" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--plan", "auto"], ["--cluster", "h100-80:1x8"]])
def test_a_search_takes_no_changes(evaluated_script, capsys, words):
    command = "run" if "--plan" in words else "plan"
    assert main([command, evaluated_script, *words, "--set", "pipeline.chunks=2"]) == 2
    assert "--set pipeline.chunks=2 changes a plan" in capsys.readouterr().err


def test_a_config_file_has_a_list_of_changes(evaluated_script, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("set: [pipeline.staleness=2, pipeline.chunks=3]\n")
    assert main(["plan", evaluated_script, "--show", "--config", str(tmp_path / "options.yaml")]) == 0
    assert "staleness 2, order fifo, publish drain, chunks 3" in capsys.readouterr().out
