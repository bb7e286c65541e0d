"""A program that is run twice in a run has two graphs, two timelines, and lines of its own in every record."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from flowrl.analysis.run_pages import look_at, programs_of, write_pages
from flowrl.errors import UsageError
from flowrl.runtime.driver.run_texts import labels

RUNTIME = Path(__file__).parents[1] / "runtime"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RUNTIME))
    spec = importlib.util.spec_from_file_location("small_flow", RUNTIME / "small_flow.py")
    small = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "small_flow", small)
    spec.loader.exec_module(small)
    given = {"ends": {"rows": 10}, "evaluated": {"steps": 2}}
    small.flow.run("evaluated", "ends", "evaluated", out=tmp_path / "run", quiet=True, parameters=given)
    return tmp_path / "run"


def test_records_tell_them_apart(run):
    for stream in ("metrics", "timeline", "traffic"):
        lines = [json.loads(line) for line in (run / f"{stream}.jsonl").read_text().splitlines()]
        found = list(dict.fromkeys(line["program"] for line in lines if stream != "timeline" or line["pool"]))
        assert [name for name in found if name != "ends"] == ["evaluated", "evaluated-2"]
    assert set(programs_of(run)) == {"evaluated", "ends", "evaluated-2"}


def test_each_has_its_own_steps_and_bytes(run):
    (first, ran), (second, again) = look_at(run, "evaluated"), look_at(run, "evaluated-2")
    assert (first.program, second.program) == ("evaluated", "evaluated-2")
    assert ran.steps == again.steps == 3 or ran.steps == again.steps == 2
    assert len(ran.bars) == len(again.bars)
    names = [(bar.node, bar.step) for bar in ran.bars]
    assert len(set(names)) == len(names)  # not two calls of one step where there is one


def test_pages_are_written_for_each(run):
    pages = write_pages(run)
    assert {path.name for path in pages.values()} >= {"graph.html", "timeline.html", "graph.evaluated-2.html"}
    assert all(path.exists() for path in pages.values())
    with pytest.raises(UsageError, match="no program 'evaluated-3'"):
        look_at(run, "evaluated-3")


def test_labels():
    assert labels(["a", "b", "a", "a", "b"]) == ["a", "b", "a-2", "a-3", "b-2"]
