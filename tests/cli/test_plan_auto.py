"""``--plan auto``: the commands that take a plan search for one on this machine; here it has two cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.flow import Flow
from flowrl.placement.plan.plan import Plan

GRPO = str(Path(__file__).parents[2] / "algorithms" / "grpo.py")


@pytest.fixture(autouse=True)
def two_cores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowrl.placement.cluster.cluster.devices_here", lambda: [("cpu", 2)])


def test_simulate_check_and_show_have_the_plan_that_is_found(capsys):
    words = ("--prompts-per-step", "4", "--steps", "6")
    assert main(["plan", GRPO, "--cluster", "auto", "--staleness", "0", *words, "--out", "found.yaml"]) == 0
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
    assert record["staleness"] == 0, "in one step"


def test_steps_overlap_in_a_plan_that_is_asked_for_and_not_by_themselves(capsys):
    """They change results, and who writes ``auto`` asks for speed."""
    Path("costs.yaml").write_text("actor.generate: 6.0\nref.logprobs: 0.1\nactor.update: 6.0\n")
    words = ("--steps", "8", "--costs", "costs.yaml")
    assert main(["plan", GRPO, "--cluster", "auto", *words, "--out", "found.yaml"]) == 0
    assert Plan.load("found.yaml").pipeline.staleness == 1
    capsys.readouterr()
    assert main(["plan", GRPO, "--show", "--plan", "auto", *words]) == 0
    assert "pipeline: staleness 0" in capsys.readouterr().out


def test_a_run_takes_it(monkeypatch, capsys):
    monkeypatch.setattr("flowrl.placement.cluster.cluster.devices_here", lambda: [("cpu", 1)])
    words = ("--prompts-per-step", "2", "--steps", "2", "--no-save", "--out", "run")
    assert main(["run", GRPO, "--plan", "auto", *words]) == 0
    told = capsys.readouterr().err
    recorded = json.loads(Path("run/run.json").read_text())
    assert recorded["plan"]["cluster"] == [{"device": "cpu", "nodes": 1, "devices_per_node": 1}]
    assert recorded["plan"]["pipeline"]["staleness"] == 0 and recorded["runtime"] == "local"
    assert "cluster: {device: cpu, nodes: 1, devices_per_node: 1}" in told, "what was found is told"
    assert f"plans in which steps overlap too: flowrl plan {GRPO} --cluster auto --out plan.yaml" in told
    assert set(recorded["plan"]["place"]) == {"actor", "ref", "reward"}


@pytest.mark.parametrize(("asked", "taken"), [((), "ray"), (("--runtime", "local"), "local")])
def test_a_run_has_the_runtime_that_it_needs_and_looks_at_its_largest_program(monkeypatch, asked, taken):
    """A pool of both devices is for ranks, and is refused where another runtime is asked for."""

    class Begun(Exception):
        pass

    def run(flow, *programs, plan, runtime, **_):
        assert programs == ("warmup", "grpo") and {"ref", "reward"} < set(plan.place)
        raise Begun(runtime)

    monkeypatch.setattr(Flow, "run", run)
    words = ("--program", "warmup,grpo", "--prompts-per-step", "2", "--grpo.steps", "2", "--warmup.steps", "2")
    with pytest.raises(Begun, match=taken):
        main(["run", GRPO, "--plan", "auto", *asked, *words])


def test_a_file_of_that_name_is_a_plan(capsys):
    Path("auto").write_text("pools: {main: {device: cpu}}\n")
    assert main(["simulate", GRPO, "--plan", "auto", "--steps", "2", "--format", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["pools"]) == ["main"]
    assert Plan.load("auto").pools["main"].device == "cpu"
