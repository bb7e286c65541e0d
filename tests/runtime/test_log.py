"""What is logged is recorded: nothing takes the place of anything else."""

from __future__ import annotations

import pytest
from flows import metrics, module_of

from flowrl.errors import ProgramError


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
        "flow.log: a step has two numbers called 'total': of first.update (line 25), and of second.update (line 26)."
    )
    assert raised.value.at.line == 26 and raised.value.at.text.startswith("flow.log(step, second.update")
    assert raised.value.fix == "Name the metrics, flow.log(step, second=metrics), or use another keyword."


def test_a_program_that_counts_by_itself_has_a_line_for_each_number(logs, tmp_path):
    logs.flow.run("between", out=tmp_path / "run", quiet=True)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
