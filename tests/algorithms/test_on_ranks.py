"""Every driver on ranks that hold whole models and split the rewards: the numbers of one process, and of three pools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from direct import run_direct
from short_runs import DRIVERS, parameters

from flowrl.analysis.run_difference import CLOCKED
from flowrl.cli import load_script
from flowrl.placement.plan.plan import Place, Plan, Pool


@pytest.fixture
def driver(drivers_path):
    return lambda name: load_script(str(Path(__file__).parents[2] / "algorithms" / f"{name}.py"))


def metrics(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.split("/")[-1] not in CLOCKED} for line in lines]


def near(found: list[dict], wanted: list[dict]) -> None:
    """The same rewards, and everything else within rounding."""
    for a, b in zip(found, wanted, strict=True):
        assert a["reward"] == b["reward"] and a.keys() == b.keys()
        for name, value in b.items():
            number = isinstance(value, float)
            assert a[name] == (pytest.approx(value, abs=1e-4, rel=1e-3) if number else value), name


def plan(flow) -> Plan:
    """Models on one rank; what has no model on two processes, which split the rows."""
    others = {h.name: Place("others") for h in flow.handles if not hasattr(h.cls, "build")}
    return Plan({"models": Pool("models", device="cpu"), "others": Pool("others", processes=2)}, others)


@pytest.mark.parametrize("name", DRIVERS)
def test_ranks_give_the_numbers_of_one_process(driver, tmp_path, name):
    flow = driver(name)
    program = flow.default_program()
    said = parameters(flow, next(iter(flow.find_program(None).presets), None), steps=2)
    flow.run(program, out=tmp_path / "here", runtime="eager", quiet=True, save_models=False, parameters={program: said})
    _, place = run_direct(flow, plan(flow), tmp_path / "ranks", program, save_models=False, parameters={program: said})
    if name in (
        "gigpo",
        "tool_use",
        "tictactoe",
    ):  # two processes play, so the policy is asked for fewer rows at a time
        near(metrics(tmp_path / "ranks"), metrics(tmp_path / "here"))
    else:
        assert metrics(tmp_path / "ranks") == metrics(tmp_path / "here")
    assert place.client.traffic.payload == 0


@pytest.mark.parametrize("name", ["grpo", "ppo", "gigpo"])
def test_two_replicas_split_the_rows(driver, tmp_path, name):
    """Shapes differ, so log-probabilities do within rounding; the tokens are the same."""
    flow = driver(name)
    program = flow.default_program()
    said = parameters(flow, next(iter(flow.find_program(None).presets), None), steps=2)
    flow.run(program, out=tmp_path / "here", runtime="eager", quiet=True, save_models=False, parameters={program: said})
    apart = Plan(
        {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", processes=2)},
        {"actor": {"train": Place("train"), "generate": Place("rollout")}},
    )
    run_direct(flow, apart, tmp_path / "ranks", program, save_models=False, parameters={program: said})
    near(metrics(tmp_path / "ranks"), metrics(tmp_path / "here"))
