"""A KV cache that cannot hold one row of an engine is an error of check, with what to write in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.analysis.check_plan import plan_findings
from flowrl.cli.arguments.script import load_script
from flowrl.placement.plan.plan import Plan

PLAN = """
cluster: {device: DEVICE, nodes: 1, devices_per_node: 2}
pools:
  train:   {devices: "0"}
  rollout: {devices: "1"}
place:
  actor:
    train:    {pool: train}
    generate: {pool: rollout, mesh: {dp: 1}, engine: SAID}
  ref:    {pool: REF}
  reward: {pool: train}
"""
SMALL = "actor.generate: the KV cache of"


def errors(folder: Path, said: str, *, device: str = "h100-80", model: str = "qwen3-1.7b", ref: str = "train"):
    file = folder / "plan.yaml"
    file.write_text(PLAN.replace("DEVICE", device).replace("SAID", said).replace("REF", ref))
    flow = load_script(str(Path(__file__).parents[2] / "algorithms" / "grpo.py"))
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    return plan_findings(flow.study(Plan.load(file), "grpo", steps=4, prompts_per_step=8))[0]


def test_a_cache_that_holds_no_row_is_an_error_with_its_line(tmp_path):
    (error,) = errors(tmp_path, "vllm, kv_cache: 1")
    assert error.what == (
        "actor.generate: the KV cache of 1 GiB holds 9362 tokens, and vllm may be given a row of 40960."
    )
    assert error.fix == "Write context: 9362 beside the engine if no row is longer, or write kv_cache: 4.5."
    assert error.at is not None and error.at.line == 9


@pytest.mark.parametrize("said", ["vllm", "vllm, kv_cache: 4.5", "vllm, kv_cache: 1, context: 9362", "hf"])
def test_what_the_fix_says_and_a_plan_that_says_nothing_are_fine(tmp_path, said):
    assert errors(tmp_path, said) == []


def test_defaults_of_a_cpu_count_there(tmp_path):
    assert f"{SMALL} 1 GiB holds 4681 tokens" in str(errors(tmp_path, "vllm", device="cpu", model="qwen3-0.6b"))
    assert SMALL not in str(errors(tmp_path, "vllm, context: 4096", device="cpu", model="qwen3-0.6b"))


def test_a_server_that_runs_has_a_cache_of_its_own(tmp_path):
    small = "sglang, kv_cache: 0.0625"
    assert SMALL in str(errors(tmp_path, small, device="cpu", model="qwen3-0.6b"))
    assert SMALL not in str(errors(tmp_path, f'{small}, url: "http://127.0.0.1:30000"', model="qwen3-0.6b"))


def test_where_the_others_leave_too_little_the_fix_is_a_shorter_context(tmp_path):
    assert SMALL not in str(errors(tmp_path, "vllm", device="l40s", model="llama-3.1-8b"))
    found = errors(tmp_path, "vllm", device="l40s", model="llama-3.1-8b", ref="rollout")
    (beside,) = (error for error in found if error.what.startswith(SMALL))
    assert "holds 89624 tokens, and vllm may be given a row of 131072" in beside.what
    assert beside.fix == "Write context: 89624 beside the engine if no row is longer, or place others elsewhere."
