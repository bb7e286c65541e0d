"""Device memory: parts in closed form, published figures, who makes way, and what is said when it does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost import worker_memory as memory
from flowrl.placement.cost.per_device_counts import kv_bytes
from flowrl.placement.cost.pool_memory import PoolMemory, Turn, pool_memory
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import Usage, generating, reading, reserve, room, training
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

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


def test_logits_are_fp32_and_chunked_by_hf():
    load = Workload(64, 1024, 1024)
    whole, chunked = (reading(REF, Mesh(), load, backend=b).working["logits"] for b in ("fsdp2", "hf"))
    assert whole == pytest.approx(8192 / 2 * 32000 * 4) and chunked == 128 << 20
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


def test_an_engine_has_whole_weights_and_room_for_staged_ones():
    usage = generating(ACTOR, Mesh.of("fsdp=4,tp=2"), LOAD, staging=True)
    assert usage.idle == {"weights": LLAMA.bytes / 2, "staged weights": LLAMA.bytes / 2}


def test_waves_count_how_often_the_cache_is_filled():
    usage = Usage("actor", "generate", {}, {"kv cache": 100.0, "logits": 10.0}, {"kv cache": 1.0}, rows=100, row=1.0)
    assert [usage.waves(free) for free in (110.0, 109.0, 60.0, 35.0, 0.0)] == [1, 2, 2, 4, 100]
    assert usage.working_in(50.0) == {"kv cache": 40.0, "logits": 10.0}
    assert usage.working_in(0.0) == {"kv cache": 1.0, "logits": 10.0}


# a pool over time

UPDATE, GENERATE = Turn("actor.update", ("actor.train",)), Turn("actor.generate", ("actor.generate",))
LOGPROBS = Turn("ref.logprobs", ("ref.train",))


def pool(*usages: Usage, total: float = 80e9) -> PoolMemory:
    return PoolMemory("train", "a100-80", total, {u.name: u for u in usages})


def plain(name: str, idle: float, working: float = 0.0, part: str = "weights") -> Usage:
    role, _, use = name.partition(".")
    return Usage(role, use, {part: idle}, {"activations": working} if working else {})


def test_a_seven_billion_model_trains_on_eight_a100_and_not_on_one():
    micro = 2048
    alone = pool(training(ACTOR, Mesh(), LOAD, micro=micro))
    error = alone.fits([UPDATE])
    assert error is not None and "actor.update needs 1" in error.what and "optimizer 80.9" in error.what
    assert pool(training(ACTOR, Mesh.of("fsdp=8"), LOAD, micro=micro)).fits([UPDATE]) is None


def test_what_does_not_fit_is_told_part_by_part():
    actor = Usage("actor", "train", {"weights": 17.5e9, "optimizer": 52.5e9}, {"gradients": 17.5e9, "logits": 1e6})
    error = pool(actor, plain("ref.train", 4e9)).fits([UPDATE, LOGPROBS])
    assert error is not None
    assert error.what == (
        "pool 'train' (a100-80): actor.update needs 93 GB of 80 GB on each device, with ref.train offloaded:"
        " optimizer 52.5, gradients 17.5, weights 17.5, reserve 5.5."
    )
    assert error.fix == "Shard actor over 2 times as many devices (fsdp or tp), or take devices with more memory."


def test_activations_that_do_not_fit_ask_for_smaller_micro_batches():
    error = pool(plain("actor.train", 20e9, 70e9)).fits([UPDATE])
    assert error is not None and error.what.endswith("activations 70, weights 20, reserve 5.5.")
    assert error.fix == "Give actor.update fewer micro_tokens, or shard actor over more devices (tp or cp)."


def test_one_row_that_does_not_fit_asks_for_shorter_ones():
    usage = Usage("actor", "generate", {"weights": 10e9}, {"kv cache": 900e9}, {"kv cache": 70e9}, rows=64, row=14e9)
    error = pool(usage).fits([GENERATE])
    assert error is not None and "actor.generate needs 85.5 GB of 80 GB on each device: kv cache 70," in error.what
    assert error.fix == "Allow actor fewer tokens per response, or shard it over more devices (tp or pp)."


def test_many_rows_never_fail_to_fit():
    thousands = generating(ACTOR, Mesh(), Workload(100_000, 1024, 1024))
    assert thousands.working["kv cache"] > 1e12
    turns = [GENERATE]
    assert pool(thousands).fits(turns) is None
    moment = pool(thousands).timeline(turns).peak
    assert moment.total == pytest.approx(80e9), "the cache takes what is left"


def test_nobody_makes_way_while_all_fit():
    both = pool(plain("actor.train", 30e9, 10e9), plain("ref.train", 14e9, 1e9))
    turns = [LOGPROBS, UPDATE]
    assert both.swaps(turns) == {} and both.fits(turns) is None
    assert [m.total for m in both.timeline(turns).moments] == pytest.approx([5.5e9 + 45e9, 5.5e9 + 54e9])


def test_the_one_whose_moves_are_cheapest_makes_way():
    turns = [LOGPROBS, UPDATE]
    both = pool(plain("actor.train", 58e9, 10e9), plain("ref.train", 14e9, 1e9))
    assert both.swaps(turns) == {"ref.train": 14e9} and both.fits(turns) is None
    timeline = both.timeline(turns)
    assert [m.onloaded for m in timeline.moments] == [("ref.train",), ()]
    assert [m.offloaded for m in timeline.moments] == [(), ("ref.train",)]
    assert timeline.peak.title == "ref.logprobs" and timeline.culprit == "actor.train weights"
    assert timeline.moments[1].parts == {
        "reserve": reserve(80e9),
        "actor.train weights": 58e9,
        "actor.train activations": 10e9,
    }


def test_somebody_makes_way_where_that_saves_a_wave():
    rows = {"rows": 100, "row": 0.5e9}
    engine = Usage("actor", "generate", {"weights": 10e9}, {"kv cache": 50e9}, {"kv cache": 0.5e9}, **rows)
    turns = [GENERATE, UPDATE]
    assert pool(engine, plain("actor.train", 14e9)).swaps(turns) == {}, "64.5 GB for the cache: one wave"
    assert pool(engine, plain("actor.train", 20e9)).swaps(turns) == {"actor.train": 20e9}
    assert pool(engine, plain("actor.train", 20e9), total=40e9).swaps(turns) == {"actor.train": 20e9}


def test_a_publish_has_the_weights_of_both():
    actor = Usage("actor", "train", {"weights": 20e9, "optimizer": 50e9}, {"gradients": 1e9})
    engine = Usage("actor", "generate", {"weights": 20e9}, {"kv cache": 40e9}, {"kv cache": 40e9}, rows=1, row=40e9)
    turns = [GENERATE, UPDATE, Turn("actor.publish", ("actor.train", "actor.generate"), publish=True)]
    memory = pool(engine, actor)
    assert set(memory.swaps(turns)) == {"actor.train", "actor.generate"} and memory.fits(turns) is None
    assert memory.timeline(turns).moments[2].parts == {
        "reserve": reserve(80e9),
        "actor.generate weights": 20e9,
        "actor.train weights": 20e9,
    }


def test_one_copy_may_serve_both_uses():
    actor = Usage("actor", "train", {"weights": 30e9, "optimizer": 20e9}, {"gradients": 20e9})
    engine = Usage("actor", "generate", {}, {"kv cache": 9e9}, {"kv cache": 1e9}, rows=9, row=1e9, shares="actor.train")
    memory = pool(engine, actor, plain("ref.train", 20e9))
    turns = [GENERATE, LOGPROBS, UPDATE]
    assert memory.fits(turns) is None
    assert "actor.train weights" in memory.timeline(turns).moments[0].parts
    assert memory.held(GENERATE, turns) == pytest.approx(20e9), "the optimizer; the weights are counted with the cache"


def test_the_cache_cannot_have_what_others_hold():
    engine = generating(ACTOR, Mesh(), LOAD)
    memory = pool(engine, plain("ref.train", 9e9))
    others = 9e9 + engine.working["activations"] + engine.working["logits"]
    assert memory.held(GENERATE, [GENERATE]) == pytest.approx(others)


sizes_gb = st.floats(0.1, 60)


@given(st.lists(st.tuples(sizes_gb, sizes_gb), min_size=1, max_size=5))
def test_it_fits_after_swaps_exactly_when_each_fits_alone(workers):
    usages = [plain(f"w{i}.train", idle * 1e9, working * 1e9) for i, (idle, working) in enumerate(workers)]
    turns = [Turn(f"w{i}.update", (u.name,)) for i, u in enumerate(usages)]
    memory = pool(*usages)
    alone = all(u.staying + u.needed <= room(80e9) for u in usages)
    assert (memory.fits(turns) is None) == alone
    if alone:
        assert memory.timeline(turns).peak.total <= 80e9 * (1 + 1e-9)


# of a plan

ROLES = (ACTOR, REF, Role("reward"))
LOADS = {(role, use): LOAD for role in ("actor", "ref", "reward") for use in ("train", "generate")}
del LOADS["ref", "generate"]


def plan(generate: Place, staleness: int = 0, backend: str = "fsdp2") -> Plan:
    shards = Place("train", Mesh.of("fsdp=8"), backend)
    devices = {"train": range(8), "rollout": range(8, 16)}
    pools = {name: Pool(name, tuple(numbers)) for name, numbers in devices.items()} | {"cpu": Pool("cpu", processes=4)}
    place = {"actor": {"train": shards, "generate": generate}, "ref": shards, "reward": Place("cpu")}
    return Plan(pools, place, Cluster((Nodes("a100-80", 2, 8),)), Pipeline(staleness=staleness))


def test_both_layouts_of_an_actor_live_in_a_pool_that_they_share():
    found = pool_memory(plan(Place("train", Mesh.of("dp=4,tp=2"), "vllm")), "train", ROLES, LOADS)
    assert found is not None and (found.pool, found.device, found.memory) == ("train", "a100-80", 80e9)
    assert set(found.residents) == {"actor.train", "actor.generate", "ref.train"}
    assert found.residents["actor.train"].idle["weights"] == LLAMA.bytes / 8
    assert found.residents["actor.generate"].idle == {"weights": LLAMA.bytes / 2}, "no step is ahead: nothing is staged"


def test_weights_are_staged_where_they_are_sent_or_steps_are_ahead():
    apart = pool_memory(plan(Place("rollout", Mesh.of("dp=4,tp=2"), "vllm")), "rollout", ROLES, LOADS)
    ahead = pool_memory(plan(Place("train", Mesh.of("dp=4,tp=2"), "vllm"), 1), "train", ROLES, LOADS)
    for found in (apart, ahead):
        assert found is not None
        assert found.residents["actor.generate"].idle == {k: LLAMA.bytes / 2 for k in ("weights", "staged weights")}
    assert set(apart.residents) == {"actor.generate"}


def test_one_copy_serves_both_uses_in_the_same_layout():
    same = plan(Place("train", Mesh.of("fsdp=8"), "hf"), backend="hf")
    found = pool_memory(same, "train", ROLES, LOADS)
    assert found is not None
    assert found.residents["actor.generate"].idle == {} and found.residents["actor.generate"].shares == "actor.train"


def test_a_pool_of_processes_has_no_device_memory():
    assert pool_memory(plan(Place("rollout")), "cpu", ROLES, LOADS) is None
