"""algorithms/grpo.py with `engine: sglang` in its plan: the rows of `engine: hf`, in this process and on ranks.

It needs `make sglang`, and runs by `make sglang-test`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flowrl.cli import load_script
from flowrl.errors import PlanError
from flowrl.placement.plan.plan import Plan

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SGLANG_PYTHON") or ROOT / ".venv-sglang/bin/python")
real = [
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not installed: make sglang"),
]
LOCAL = """
pools: {train: {device: cpu}, rollout: {device: cpu}}
place:
  actor:
    train:    {pool: train}
    generate: {pool: rollout, engine: ENGINE}
  ref:    {pool: train}
  reward: {pool: train}
"""
RANKS = """
cluster: {device: cpu, devices_per_node: 4}
pools: {train: {devices: "0-1"}, rollout: {devices: "2"}}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: 2}, backend: fsdp2}
    generate: {pool: rollout, engine: ENGINE}
  ref:    {pool: train, mesh: {fsdp: 2}, backend: fsdp2}
  reward: {pool: train}
"""
SAID = {"steps": 3, "prompts_per_step": 6, "group_size": 4}


@pytest.fixture
def flow(drivers_path):
    return load_script(str(ROOT / "algorithms" / "grpo.py"))


def ran(flow, folder, text, runtime):
    """The rows of a run under this plan, and its metrics."""
    folder.with_suffix(".yaml").write_text(text)
    plan = Plan.load(folder.with_suffix(".yaml"))
    how = {"quiet": True, "save_models": False, "parameters": {"grpo": SAID}}
    flow.run("grpo", plan=plan, out=folder, runtime=runtime, **how)
    read = [
        [json.loads(x) for x in (folder / f).read_text().splitlines()] for f in ("trajectories.jsonl", "metrics.jsonl")
    ]
    return [(row["step"], row["key"], row["response"]) for row in read[0]], read[1]


@pytest.mark.parametrize(
    ("text", "runtime"),
    [
        pytest.param(LOCAL, "local", id="local", marks=real),
        pytest.param(RANKS, "ray", id="ranks", marks=real),
    ],
)
def test_grpo_makes_the_rows_of_the_reference_engine(flow, tmp_path, text, runtime):
    engine = f"engine: sglang, rows: 64, kv_cache: 0.25, python: {PYTHON}"
    rows, lines = ran(flow, tmp_path / "sglang", text.replace("engine: ENGINE", engine), runtime)
    theirs, wanted = ran(flow, tmp_path / "hf", text.replace("ENGINE", "hf"), runtime)
    assert len(lines) == len(wanted) == SAID["steps"] and rows
    assert rows == theirs
    for mine, other in zip(lines, wanted, strict=True):
        assert mine["reward"] == other["reward"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-3)


def test_what_no_run_has_is_refused_before_it_starts(flow, tmp_path):
    text = (
        RANKS.replace("engine: ENGINE", "mesh: {tp: 1}, engine: sglang")
        .replace('"2"', '"2-3"')
        .replace("tp: 1", "tp: 2")
    )
    with pytest.raises(PlanError, match="actor.generate: sglang has tp=2 in no run yet"):
        ran(flow, tmp_path / "sglang", text, "ray")
    for said, wrong in (
        ("patience: soon", "patience is a number from 1 up, not soon"),
        ("url: 30000", "url is a text, not 30000"),
        ("kv_tokens: 8", "kv_tokens"),
    ):
        with pytest.raises(PlanError, match=wrong):
            ran(flow, tmp_path / "sglang", LOCAL.replace("engine: ENGINE", f"engine: sglang, {said}"), "local")
