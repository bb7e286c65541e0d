"""``--plan auto``: the commands that take a plan search for one on this machine; here it has two cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.placement.plan.plan import Plan

GRPO = str(Path(__file__).parents[2] / "algorithms" / "grpo.py")


@pytest.fixture(autouse=True)
def two_cores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowrl.placement.cluster.cluster.devices_here", lambda: [("cpu", 2)])


def test_simulate_check_and_show_have_the_plan_that_is_found(capsys):
    words = ("--prompts-per-step", "4", "--steps", "6")
    assert main(["plan", GRPO, "--cluster", "auto", *words, "--out", "found.yaml"]) == 0
    capsys.readouterr()
    step = {}
    for plan in ("auto", "found.yaml"):
        assert main(["simulate", GRPO, "--plan", plan, *words, "--format", "json"]) == 0
        step[plan] = json.loads(capsys.readouterr().out)["step_s"]
        assert main(["check", GRPO, "--plan", plan, *words]) == 0
        assert "grpo: fine" in capsys.readouterr().out
        assert main(["plan", GRPO, "--show", "--plan", plan, *words]) == 0
        assert "cluster: cpu:1x2" in capsys.readouterr().out
    assert step["auto"] == step["found.yaml"]


def test_costs_and_lengths_of_the_words_decide(capsys):
    Path("costs.yaml").write_text("actor.generate: 6.0\nref.logprobs: 2.0\nactor.update: 6.0\n")
    words = ("--steps", "8", "--costs", "costs.yaml", "--format", "json")
    assert main(["simulate", GRPO, "--plan", "auto", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["cost_source"] == "given: costs.yaml"
    assert record["step_s"] < 6 + 2 + 6, "the two cores work at the same time"


def test_a_run_takes_it(capsys):
    words = ("--prompts-per-step", "2", "--steps", "2", "--no-save", "--out", "run")
    assert main(["run", GRPO, "--plan", "auto", *words]) == 0
    told = capsys.readouterr().err
    recorded = json.loads(Path("run/run.json").read_text())["plan"]
    assert recorded["cluster"] == [{"device": "cpu", "nodes": 1, "devices_per_node": 2}]
    assert "cluster: {device: cpu, nodes: 1, devices_per_node: 2}" in told, "what was found is told"
    assert set(recorded["place"]) == {"actor", "ref", "reward"}


def test_a_file_of_that_name_is_a_plan(capsys):
    Path("auto").write_text("pools: {main: {device: cpu}}\n")
    assert main(["simulate", GRPO, "--plan", "auto", "--steps", "2", "--format", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["pools"]) == ["main"]
    assert Plan.load("auto").pools["main"].device == "cpu"
