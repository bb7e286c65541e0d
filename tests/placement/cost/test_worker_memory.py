"""Device memory: parts in closed form, published figures, who makes way, and what is said when it does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost import worker_memory as memory
from flowrl.placement.cost.per_device_counts import kv_bytes
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import Usage, generating, reading, training, usage_of
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.plan.plan import Place

LOAD = Workload(128, 1024, 1024)
LLAMA = shape_named("llama-7b")
ACTOR, REF = Role("actor", LLAMA, trains=True, generates=True), Role("ref", LLAMA)
STATE = ("weights", "gradients", "optimizer")


def state(usage: Usage) -> float:
    parts = {**usage.idle, **usage.working}
    return sum(parts[p] for p in STATE)


# parts


@pytest.mark.parametrize("name", ["llama-7b", "llama-70b", "qwen3-0.6b", "qwen3-30b-a3b"])
def test_adamw_in_bf16_takes_16_bytes_per_parameter(name):
    model = shape_named(name)
    assert state(training(Role("actor", model, trains=True), Mesh(), LOAD)) == pytest.approx(16 * model.parameters)


def test_a_seven_billion_model_takes_112_gb_to_train():
    """The figure of ZeRO's table of 16 bytes per parameter (arXiv:1910.02054): 7e9 parameters, 112 GB."""
    seven = ModelShape.uniform(7, 10_000, 100_000)
    assert seven.parameters == 7_000_000_000
    usage = training(Role("actor", seven, trains=True), Mesh(), LOAD)
    assert state(usage) == pytest.approx(112e9)
    assert usage.idle == {"weights": 14e9, "optimizer": 84e9}


def test_an_fp32_model_is_its_own_master():
    wide = ModelShape.uniform(4, 250, 1000, dtype_bytes=4)
    usage = training(Role("actor", wide, trains=True), Mesh(), LOAD)
    assert (usage.idle["weights"], usage.working["gradients"], usage.idle["optimizer"]) == (4e6, 4e6, 8e6)


@given(st.sampled_from(["fsdp", "tp", "pp"]), st.sampled_from([2, 4, 8, 16]))
def test_state_is_sharded(axis, size):
    whole, part = (state(training(ACTOR, Mesh({axis: n}), LOAD)) for n in (1, size))
    assert part == pytest.approx(whole / size)


def test_replicas_shard_the_optimizer_with_megatron_alone():
    plain, distributed = (training(ACTOR, Mesh.of("dp=8"), LOAD, backend=b) for b in ("fsdp2", "megatron"))
    assert plain.idle["optimizer"] == pytest.approx(12 * LLAMA.parameters)
    assert distributed.idle["optimizer"] == pytest.approx(12 * LLAMA.parameters / 8)
    assert plain.idle["weights"] == distributed.idle["weights"] == pytest.approx(2 * LLAMA.parameters)


def test_experts_are_spread_over_ep_and_the_rest_is_not():
    model = shape_named("qwen3-30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    usage = training(Role("actor", model, trains=True), Mesh.of("ep=8"), LOAD)
    assert usage.idle["weights"] == pytest.approx(2 * (model.parameters - experts + experts / 8))


def test_adapters_have_the_only_gradients():
    usage = training(Role("actor", LLAMA, trains=True, lora=20_000_000), Mesh(), LOAD)
    assert usage.working["gradients"] == pytest.approx(40e6)
    assert usage.idle["optimizer"] == pytest.approx(240e6)
    assert usage.idle["weights"] == pytest.approx(4 * LLAMA.parameters + 40e6), "in fp32, beside what is trained"


def test_activations_of_a_layer_are_those_of_korthikanti():
    """34 bytes per token and hidden unit for a feed-forward layer of four times the width in two matrices."""
    gpt = ModelShape("gpt", 1, 1024, 4096 * 2 // 3, 16, 16, 64, 1000)  # as many parameters in three matrices
    layer = memory.layer_activations(gpt, Mesh(), 1000)
    assert layer == pytest.approx(34 * 1000 * 1024, rel=1e-3)
    assert memory.layer_activations(gpt, Mesh.of("tp=8"), 1000) == pytest.approx((10 + 24 / 8) * 1000 * 1024, rel=1e-3)
    sequence = memory.layer_activations(gpt, Mesh.of("tp=8"), 1000, backend="megatron")
    assert sequence == pytest.approx(34 / 8 * 1000 * 1024, rel=1e-3)


def test_recomputation_keeps_the_input_of_every_layer():
    layer = memory.layer_activations(LLAMA, Mesh(), 1000)
    assert memory.activations(LLAMA, Mesh(), 1000, recompute=False) == pytest.approx(32 * layer)
    assert memory.activations(LLAMA, Mesh(), 1000) == pytest.approx(32 * 2 * 1000 * 4096 + layer)


def test_the_first_stage_of_a_pipeline_holds_a_micro_batch_for_each_stage():
    one, four = (training(ACTOR, Mesh.of(m), LOAD).working["activations"] for m in ("", "pp=4"))
    assert four == pytest.approx(one)


def test_fsdp_gathers_a_layer_while_it_fetches_the_next():
    usage = training(ACTOR, Mesh.of("fsdp=8"), LOAD)
    assert usage.working["gathered weights"] == pytest.approx(2 * LLAMA.bytes / 32)


def test_logits_are_chunked_by_all_backends_that_train_and_those_of_few_tokens_are_whole():
    load = Workload(64, 1024, 1024)
    sizes = {reading(REF, Mesh(), load, backend=b).working["logits"] for b in ("hf", "fsdp2", "megatron")}
    assert sizes == {128 << 20}
    short = Workload(4, 64, 64)
    assert reading(REF, Mesh(), short, backend="fsdp2").working["logits"] == pytest.approx(4 * 64 * 32000 * 4)


def test_gradients_beside_a_master_copy_that_is_split_are_fp32_and_whole():
    split, whole = (training(ACTOR, Mesh.of("dp=4"), LOAD, backend=b) for b in ("fsdp2", "megatron"))
    assert split.working["gradients"] == pytest.approx(LLAMA.bytes)
    assert whole.working["gradients"] == pytest.approx(2 * LLAMA.bytes)


def test_value_heads_have_no_logits():
    load = Workload(64, 1024, 1024)
    value = Role("critic", LLAMA, trains=True, head="scalar")
    assert training(value, Mesh(), load, backend="fsdp2").working["logits"] == 0


def test_a_cache_wants_all_rows_and_needs_one_of_the_longest():
    usage = generating(ACTOR, Mesh.of("dp=4,tp=2"), Workload(128, 1024, 1024, longest=3072))
    token = 2 * 32 * 32 * 128 * 2  # keys and values, layers, heads, width, bytes
    assert LLAMA.kv_bytes_per_token == token
    assert usage.working["kv cache"] == pytest.approx(32 * 2048 * token / 2)
    assert usage.least["kv cache"] == pytest.approx((1024 + 3072) * token / 2)
    assert usage.idle == {"weights": pytest.approx(LLAMA.bytes / 2)}


def test_kv_heads_are_replicated_when_they_are_fewer_than_shards():
    model = shape_named("qwen3-30b-a3b")  # 4 heads of keys and values
    whole, two, four, eight = (kv_bytes(model, Mesh({"tp": n}), 1000) for n in (1, 2, 4, 8))
    assert (two, four, eight) == (whole / 2, whole / 4, whole / 4)


def test_an_engine_has_whole_weights_and_no_second_copy():
    usage = generating(ACTOR, Mesh.of("fsdp=4,tp=2"), LOAD)
    assert usage.idle == {"weights": LLAMA.bytes / 2}


def test_waves_count_how_often_the_cache_is_filled():
    usage = Usage("actor", "generate", {}, {"kv cache": 100.0, "logits": 10.0}, {"kv cache": 1.0}, rows=100, row=1.0)
    assert [usage.waves(free) for free in (110.0, 109.0, 60.0, 35.0, 0.0)] == [1, 2, 2, 4, 100]
    assert usage.working_in(50.0) == {"kv cache": 40.0, "logits": 10.0}
    assert usage.working_in(0.0) == {"kv cache": 1.0, "logits": 10.0}


def test_a_cache_that_the_plan_says_stays_between_calls_and_is_emptied_for_others():
    role = Role("actor", shape_named("qwen3-0.6b"), trains=True, generates=True)
    place = Place("gpu", Mesh.of("dp=2"), "vllm", options={"kv_cache": 2.0})
    usage = usage_of(role, "generate", place, Place("gpu", Mesh.of("fsdp=2"), "fsdp2"), Workload(8, 16, 64))
    weights = usage.idle["weights"]
    assert usage.emptied == {"kv cache": 2.0 * (1 << 30)} and "kv cache" not in usage.working
    assert (usage.staying, usage.moved) == (weights + 2.0 * (1 << 30), weights), "nothing of it is copied"
