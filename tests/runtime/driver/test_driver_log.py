"""What is logged is recorded: nothing takes the place of anything else."""

from __future__ import annotations

import json

import pytest
from flows import metrics, module_of

from flowrl.analysis.run_pages import write_pages
from flowrl.errors import ProgramError, WorkerError


@pytest.fixture
def logs():
    module_of("small_flow")
    return module_of("log_flow")


def test_a_keyword_that_is_called_like_a_worker_stands_beside_its_metrics(logs, tmp_path):
    logs.flow.run("both", out=tmp_path / "run", quiet=True)
    assert [set(line) - {"program", "step"} for line in metrics(tmp_path / "run")] == [
        {"first/total", "first/count", "second/total", "second/count", "first"}
    ] * 2


def test_metrics_whose_names_only_the_run_knows_are_refused_as_soon_as_they_collide(logs, tmp_path):
    with pytest.raises(ProgramError) as raised:
        logs.flow.run("unknown", out=tmp_path / "run", quiet=True)
    assert raised.value.what == (
        "flow.log: a step has two numbers called 'total': of first.update (line 52), and of second.update (line 53)."
    )
    assert raised.value.at.line == 53 and raised.value.at.text.startswith("flow.log(step, second.update")
    assert raised.value.fix == "Name the metrics, flow.log(step, second=metrics), or use another keyword."


def test_a_program_that_counts_by_itself_has_a_line_for_each_number(logs, tmp_path):
    logs.flow.run("between", out=tmp_path / "run", quiet=True)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def test_numbers_of_numpy_and_torch_are_recorded_and_kept_like_those_of_python(logs, tmp_path):
    """The metrics are held by the program while its checkpoints are taken."""
    for out, last in (("whole", 3), ("run", 2), ("run", 3)):
        how = {"resume": (tmp_path / out).exists(), "checkpoint_every": 1}
        logs.flow.run("measured", out=tmp_path / out, quiet=True, steps=last, **how)
    assert [(line["half"], line["two"], line["three"]) for line in metrics(tmp_path / "run")] == [(0.5, 2.0, 3)] * 3
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_metric_that_is_an_array_is_refused_where_it_is_made(logs, tmp_path):
    with pytest.raises(WorkerError) as raised:
        logs.flow.run("measured", out=tmp_path / "run", quiet=True, size=2)
    assert raised.value.what == "measures.measure gives the metric 'two' that is an array of shape (2,)."
    assert raised.value.fix == "Reduce it to one number first, with .mean() or .sum()."


def test_texts_with_separators_of_lines_are_read_back(logs, tmp_path):
    logs.flow.run("noted", out=tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
    assert [json.loads(line)["note"] for line in lines] == ["a\u2028b\x85c"] * 2
    assert "timeline" in write_pages(tmp_path / "run")


def test_columns_called_like_the_place_of_a_row_stand_beside_it(logs, tmp_path):
    logs.flow.run("placed", out=tmp_path / "run", quiet=True)
    first = json.loads((tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()[0])
    assert (first["program"], first["step"], first["key"]) == ("placed", 0, [0])
    assert (first["batch.step"], first["batch.key"]) == ("of the data", "of the data")
