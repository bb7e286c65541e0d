"""The pages at the end of a run are drawn in a process of their own, and never keep anybody from the result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from flowrl.cli.pages_process import draw_apart
from flowrl.graph.record import Graph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of a program whose graph has one call."""
    graph = Graph("tiny", (), ()).to_json()
    (tmp_path / "run.json").write_text(json.dumps({"graphs": {"tiny": graph}}))
    return tmp_path


def test_the_line_says_where_the_pages_are(folder):
    assert draw_apart(folder) == f"graph: {folder / 'graph.html'}"
    assert (folder / "graph.html").read_text().startswith("<!doctype html>")


def test_every_program_has_a_line(folder):
    record = json.loads((folder / "run.json").read_text())
    record["graphs"]["other"] = Graph("other", (), ()).to_json()
    (folder / "run.json").write_text(json.dumps(record))
    assert draw_apart(folder).splitlines() == [
        f"graph: {folder / 'graph.html'}",
        f"graph of other: {folder / 'graph.other.html'}",
    ]


def test_pages_that_take_long_are_not_waited_for(folder):
    assert "still being drawn" in draw_apart(folder, seconds=0.0)
    until = time.monotonic() + 60
    while not (folder / "graph.html").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "holds no run"),
        ("{}", "has no graph in its run.json"),
        ('{"graphs": {"tiny"', "is no JSON, and no checkpoint has a copy"),
    ],
)
def test_pages_that_cannot_be_drawn_are_one_line_and_the_command(folder, record, why):
    (folder / "run.json").unlink()
    if record is not None:
        (folder / "run.json").write_text(record)
    said, fix = draw_apart(folder).splitlines()
    assert said.startswith("the pages of the run were not drawn: ") and why in said
    assert fix == f"  fix  flowrl graph {folder}"


def test_a_python_that_cannot_be_started_is_one_line_and_the_command(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(folder / "no python"))
    assert draw_apart(folder).splitlines() == [
        "the pages of the run were not drawn: Python was not started: No such file or directory",
        f"  fix  flowrl graph {folder}",
    ]


def test_files_of_the_working_folder_are_not_taken_for_libraries(folder, tmp_path, monkeypatch):
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "string.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(beside)
    assert draw_apart(folder) == f"graph: {folder / 'graph.html'}"
