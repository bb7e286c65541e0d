"""``flowrl run RUN``: programs of its script on the weights of one of its checkpoints, and options of evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli import main

RUNTIME = Path(__file__).parents[1] / "runtime"


@pytest.fixture
def script(evaluated_script):
    return evaluated_script


def lines(out, program):
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["program"] == program]


def score(out):
    found = [line["score"] for line in lines(out, "evaluate")]
    return sum(found) / len(found)


@pytest.fixture
def run(script, tmp_path):
    """A run with an evaluation every two steps and a checkpoint with each."""
    out = tmp_path / "run"
    words = ["--evaluate", "evaluate:2", "--keep-best", "score:min", "--checkpoint-every", "2", "--keep-last", "9"]
    assert main(["run", script, "--steps", "6", "--out", str(out), "--quiet", *words]) == 0
    return out


def test_a_program_is_run_on_any_checkpoint_of_a_run(run, tmp_path, capsys):
    logged = {line["step"]: line["score"] for line in lines(run, "evaluate")}
    record = json.loads((run / "run.json").read_text())
    best = record["best"]
    for which, expected in (("best", best["value"]), ("last", logged[6]), ("0", logged[2]), (None, logged[6])):
        out = tmp_path / f"on {which}"
        words = ["--checkpoint", which] if which else []
        assert main(["run", str(run), "--program", "evaluate", "--out", str(out), "--quiet", *words]) == 0
        assert score(out) == pytest.approx(expected), which
        assert not list(out.glob("checkpoints/*/*")) and not (out / "model").exists(), "the state is in the run"
    assert json.loads((run / "run.json").read_text()) == record, "nothing is changed in the run"


def test_another_training_begins_with_it(run, script, tmp_path):
    """A run of six steps, and one of two from its first checkpoint: the prompts are drawn anew."""
    out = tmp_path / "more"
    assert main(["run", str(run), "--checkpoint", "0", "--steps", "2", "--out", str(out), "--quiet"]) == 0
    fresh = tmp_path / "fresh"
    assert main(["run", script, "--steps", "2", "--out", str(fresh), "--quiet"]) == 0
    assert lines(out, "train")[0]["total"] != lines(fresh, "train")[0]["total"]
    assert json.loads((out / "run.json").read_text())["inputs"]["seed"]["checkpoint"].startswith("000000 of ")
    assert main(["run", str(out), "--resume", "--steps", "3", "--quiet"]) == 0
    assert len(lines(out, "train")) == 3


def test_a_run_goes_on_by_its_folder(run, script, tmp_path):
    assert main(["run", str(run), "--resume", "--steps", "8", "--quiet"]) == 0
    whole = tmp_path / "whole"
    words = ["--evaluate", "evaluate:2", "--steps", "8", "--out", str(whole), "--quiet"]
    assert main(["run", script, *words]) == 0
    assert score(run) == score(whole)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--checkpoint", "17"], "has no checkpoint '17'"),
        (["--checkpoint", "first"], "has no checkpoint 'first'"),
        (["--program", "evalute"], "has no program 'evalute'"),
        (["--stop-when", "score"], "names no metric and patience"),
    ],
)
def test_what_is_not_there_is_named(run, tmp_path, capsys, words, what):
    assert main(["run", str(run), "--out", str(tmp_path / "out"), "--quiet", *words]) == 2
    assert what in capsys.readouterr().err


def test_a_checkpoint_needs_its_run(script, tmp_path, capsys):
    assert main(["run", script, "--checkpoint", "best", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--checkpoint best: that is no folder of a checkpoint." in said
    assert "flowrl run RUN --checkpoint best" in said


def test_parameters_of_an_evaluation_have_its_name_before_them(script, tmp_path, capsys):
    words = ["--steps", "2", "--quiet", "--evaluate", "evaluate:2"]
    out = tmp_path / "run"
    assert main(["run", script, *words, "--evaluate.level", "1e9", "--out", str(out)]) == 0
    assert [line["above"] for line in lines(out, "evaluate")] == [0.0]
    assert main(["run", script, *words, "--level", "1e9", "--out", str(tmp_path / "b")]) == 2
    assert "--level" in capsys.readouterr().err


def test_a_replay_evaluates_too(run):
    assert main(["replay", str(run)]) == 0
