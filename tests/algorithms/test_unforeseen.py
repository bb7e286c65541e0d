"""Drivers that nobody had in mind: checked, drawn, equal under both runtimes, and the same in two goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.analysis.run_difference import CLOCKED
from flowrl.cli import load_script
from flowrl.graph.draw import render
from flowrl.runtime.driver.run_settings import Outcome

HERE = Path(__file__).parent / "unforeseen"
DRIVERS = ("judged_mixture", "moving_reference", "two_policies")


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "algorithms"))


def run(name: str, out: Path, runtime: str = "local", **how) -> Outcome:
    return load_script(str(HERE / f"{name}.py")).run(out=out, runtime=runtime, quiet=True, save_models=False, **how)


def lines(out: Path) -> list[dict]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.split("/")[-1] not in CLOCKED} for line in found]


@pytest.mark.parametrize("name", DRIVERS)
def test_check_finds_nothing(name):
    report = load_script(str(HERE / f"{name}.py")).check()
    assert report.text() == f"{name}: fine"


@pytest.mark.parametrize("name", DRIVERS)
def test_a_run_that_is_made_longer_is_the_one_that_was_not_stopped(name, tmp_path):
    whole = run(name, tmp_path / "whole", "eager", steps=4)
    run(name, tmp_path / "longer", steps=2)
    longer = run(name, tmp_path / "longer", steps=4, resume=True)
    assert longer.weights_digest == whole.weights_digest
    assert lines(tmp_path / "longer") == lines(tmp_path / "whole")


def test_rows_of_another_policy_are_trained_on_where_they_are_meant(tmp_path):
    flow = load_script(str(HERE / "two_policies.py"))
    assert [error.what for error in flow.check(meant=False).errors] == [
        "left.update: loss ppo_clip is one of the policy that sampled the rows, and these were sampled by right.",
        "right.update: loss ppo_clip is one of the policy that sampled the rows, and these were sampled by left.",
    ]
    drawn = render(flow.graph(), "text").splitlines()
    assert [line.split()[0].split("(")[0] for line in drawn if " on rows of " in line] == [
        "left.update#2",
        "right.update#2",
    ]
    run("two_policies", tmp_path, steps=2)
    first = lines(tmp_path)[0]
    assert first["left_ratio"] == pytest.approx(1, abs=1e-5) and first["left_other"] != pytest.approx(1, abs=1e-4)
    assert (first["left"], first["right"]) == (pytest.approx(0.6), pytest.approx(1.4))
