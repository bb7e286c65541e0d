"""A recorded run is read from Python: what it has, in plain values, whatever is lacking or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from flows import module_of

import flowrl as fl
from flowrl.errors import UsageError
from flowrl.runtime.storage.run_record import write_record

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a program of three steps."""
    out = tmp_path_factory.mktemp("runs") / "first"
    module_of("small_flow").flow.run(out=out, quiet=True, steps=3, seed=5)
    return out


def written(folder: Path, **lines: list[dict]) -> fl.OpenedRun:
    """A run with these lines in its files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder, {"programs": ["grpo", "evaluate"], "status": "running", "script": HOSTILE})
    for name, some in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    return fl.open_run(folder)


def test_a_run_has_its_metrics_configuration_plan_and_graph(folder: Path, tmp_path: Path) -> None:
    run = fl.open_run(str(folder))
    record = json.loads((folder / "run.json").read_text())
    assert (run.status, run.note, run.folder) == ("done", "", folder)
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
    assert run.metrics() == [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.config["seed"] == 5 and run.config["workers"]["counter: start"] == "1.0"
    assert run.plan == record["plan"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(run.plan))
    assert fl.Plan.load(tmp_path / "plan.yaml").to_json() == run.plan, "it is what a plan file has"
    program = record["programs"][0]
    assert run.graph().to_json() == run.graph(program).to_json() == record["graph"]
    assert repr(run) == f"<run {folder}: {program}; done>"


def test_reading_changes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run = fl.open_run(folder)
    _ = run.metrics(), run.rows(), run.events(), run.config, run.plan, run.graph(), run._repr_html_(), repr(run)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_programs_steps_and_kinds_are_told_apart(tmp_path: Path) -> None:
    metrics = [{"program": p, "step": s, "reward": s / 2} for p in ("grpo", "evaluate") for s in (0, 1)]
    rows = [{"program": "grpo", "step": s, "key": [s, k]} for s in range(4) for k in range(3)]
    events = [{"time": 1.0, "kind": k, "text": HOSTILE} for k in ("alarm", "resumed", "alarm")]
    run = written(tmp_path / "run", metrics=metrics, trajectories=rows, events=events)
    assert run.metrics("evaluate") == metrics[2:] and run.metrics("nobody") == []
    assert run.rows(step=2) == rows[6:9] and run.rows("evaluate") == []
    assert run.rows(skip=4, count=5) == rows[4:9] and run.rows(skip=10) == rows[10:] and run.rows(count=0) == []
    assert run.rows(count=None) == rows == list(run.each_row())
    assert run.events("alarm") == [events[0], events[2]] and run.events() == events
    assert HOSTILE not in run._repr_html_() and "&lt;img" in run._repr_html_()


def test_what_is_damaged_or_of_another_flowrl_is_told_or_left_out(tmp_path: Path) -> None:
    times = [1e300, float("nan"), "yesterday", None]
    events = [{"kind": "alarm", "time": time, "text": "odd"} for time in times]
    run = written(tmp_path / "run", metrics=[{"program": ["grpo"], "step": 0}], events=events)
    assert run._repr_html_().count("odd") == 4 and "grpo" in run._repr_html_()
    with pytest.raises(UsageError, match=r"has no graph\.\n"):
        run.graph()
    for graph in ({}, [], "x", {"program": "grpo", "nodes": 3}):
        write_record(run.folder, {"programs": None, "status": None, "graph": graph, "graphs": None})
        odd = fl.open_run(run.folder)
        assert (odd.status, odd.plan, repr(odd)) == ("", {}, f"<run {run.folder}: ; >")
        with pytest.raises(UsageError, match="is none that this flowrl reads"):
            odd.graph()
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        fl.open_run("x" * 5000)


@pytest.mark.parametrize("wrong", [{"count": 1.5}, {"count": True}, {"skip": None}, {"skip": "3"}, {"count": -1}])
def test_numbers_of_rows_that_are_none_are_refused(tmp_path: Path, wrong: dict) -> None:
    run = written(tmp_path / "run", trajectories=[{"program": "grpo", "step": 0}])
    with pytest.raises(UsageError, match="it is a number of rows, 0 or more"):
        run.rows(**wrong)


@pytest.mark.parametrize("step", ["a", 1.0, -1, True])
def test_a_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    run = written(tmp_path / "run", trajectories=[{"program": "grpo", "step": 1}])
    with pytest.raises(UsageError, match="it is the number of a step, from 0"):
        run.rows(step=step)


def test_rows_come_in_pages_of_fifty_and_a_large_file_is_not_held(tmp_path: Path) -> None:
    run = written(tmp_path / "run", trajectories=[{"program": "grpo", "step": s} for s in range(500)])
    assert [row["step"] for row in run.rows()] == list(range(50))
    each = run.each_row()
    assert [next(each)["step"] for _ in range(3)] == [0, 1, 2]


def test_a_live_run_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    run = written(tmp_path / "run", metrics=[{"program": "grpo", "step": 0}])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"program": "grpo", "step": 1}\n{"program": "gr')
    assert [line["step"] for line in run.metrics()] == [0, 1] and run.status == "running"
    assert run.rows() == [] and run.events() == [] and run.plan == {}


def test_metrics_are_a_frame_where_pandas_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = fl.open_run(folder).frame()
    assert list(frame["step"]) == [0, 1, 2] and "seconds" in frame
    monkeypatch.setattr("flowrl.opened_run.import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(UsageError, match="needs pandas, which is not installed"):
        fl.open_run(folder).frame()


def test_what_is_not_there_is_told(tmp_path: Path, folder: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="holds no run"):
            fl.open_run(path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(fl.errors.ResumeError, match="is no JSON"):
        fl.open_run(tmp_path)
    run = fl.open_run(folder)
    with pytest.raises(UsageError, match="has no graph of 'nobody'"):
        run.graph("nobody")
    with pytest.raises(UsageError, match="0 or more"):
        run.rows(skip=-1)


def test_a_notebook_shows_the_last_numbers_and_the_alarms(folder: Path, tmp_path: Path) -> None:
    shown = fl.open_run(folder)._repr_html_()
    assert f"done: {folder}" in shown and "<td>total</td>" in shown
    alarms = [{"time": 1.0, "kind": "alarm", "text": f"alarm {n}"} for n in range(12)]
    shown = written(tmp_path / "run", events=alarms)._repr_html_()
    assert "alarm 11" in shown and "alarm 1<" not in shown, "the last ten"
