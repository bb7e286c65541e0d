"""What a plan foretells of a run is that of a simulation, and is in the record of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.algorithms import grpo
from flowrl.analysis.forecast import forecast_of
from flowrl.placement.plan.plan import Pipeline, Place, Plan

PLAN = Plan(
    {"train": "cpu", "rollout": "cpu"},
    {"actor": {"train": Place("train"), "generate": Place("rollout")}},
    pipeline=Pipeline(staleness=1),
)


def test_a_forecast_is_that_of_a_simulation() -> None:
    study = grpo.flow.study(PLAN, "grpo")
    found, flown = forecast_of(study), study.simulate(9)
    assert found is not None and found == json.loads(json.dumps(found))
    assert found["step_seconds"] == pytest.approx(flown.step_seconds) and found["source"] == "roofline"
    assert found["pools"]["rollout"]["busy"] == pytest.approx(next(p.busy for p in flown.pools if p.name == "rollout"))
    assert 0 < found["calls"]["actor.generate"] < found["step_seconds"] and 0 < found["lag"] <= 1


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_run_with_a_plan_keeps_its_forecast(tmp_path: Path, plan: Plan | None) -> None:
    grpo.flow.run(
        out=tmp_path, plan=plan, steps=1, prompts_per_step=2, group_size=2, quiet=True, save_models=False, seed=0
    )
    kept = json.loads((tmp_path / "run.json").read_text())["forecasts"]
    assert set(kept) == ({"grpo"} if plan else set())
    assert plan is None or kept["grpo"]["calls"]["actor.update"] > 0
