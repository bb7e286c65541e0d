"""The memory of a pool over time: who makes way for whom, and what is said where it does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.pool_memory import PoolMemory, Turn, pool_memory
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import Usage, generating, reserve, room, training
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

LOAD = Workload(128, 1024, 1024)
LLAMA = shape_named("llama-7b")
ACTOR, REF = Role("actor", LLAMA, trains=True, generates=True), Role("ref", LLAMA)

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


def kept(name: str, rows: int = 99) -> Usage:
    """An engine whose cache stays between calls."""
    role, _, use = name.partition(".")
    return Usage(role, use, {"weights": 10e9}, {"kv cache": rows * 1e9}, {"kv cache": 1e9}, rows, 1e9, keeps=True)


def test_a_cache_that_stays_has_what_is_left_in_every_turn():
    turns, train, engine = [GENERATE, UPDATE], plain("actor.train", 20e9, 30e9), kept("actor.generate", rows=10)
    assert pool(train, replace(engine, keeps=False)).held(GENERATE, turns) == 20e9, "a cache of its own turn"
    both = pool(train, engine)
    assert not both.swaps(turns) and both.cache("actor.generate", turns) == pytest.approx(room(80e9) - 60e9)
    assert both.held(GENERATE, turns) == pytest.approx(20e9 + 30e9), "activations of the other turn too"


def test_an_engine_makes_way_where_that_leaves_it_more_rows():
    turns = [GENERATE, UPDATE]
    both = pool(plain("actor.train", 20e9, 30e9), kept("actor.generate", rows=40))
    assert list(both.swaps(turns)) == ["actor.generate"]
    assert both.cache("actor.generate", turns) == pytest.approx(room(80e9) - 10e9 - 20e9)


def test_engines_that_are_there_together_have_equal_parts():
    judge = Turn("judge.ask", ("judge.generate",))
    both, turns = pool(kept("actor.generate"), kept("judge.generate")), [GENERATE, judge]
    assert [both.cache(f"{name}.generate", turns, in_turns=False) for name in ("actor", "judge")] == [
        pytest.approx((room(80e9) - 20e9) / 2)
    ] * 2


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
    """On the devices that train, as wide as they are there: fp32 where they are their own master copy."""
    apart, ahead = Place("rollout", Mesh.of("dp=4,tp=2"), "vllm"), Place("train", Mesh.of("dp=4,tp=2"), "vllm")
    for generate, staleness in ((apart, 0), (apart, 1), (ahead, 1)):
        found = pool_memory(plan(generate, staleness), "train", ROLES, LOADS)
        assert found is not None
        assert found.residents["actor.train"].idle["staged weights"] == 2 * LLAMA.bytes / 8
    kept = replace(plan(apart, 1), pipeline=Pipeline(staleness=1, copies=2))
    found = pool_memory(kept, "train", ROLES, LOADS)
    assert found is not None
    assert found.residents["actor.train"].idle["staged weights"] == 4 * LLAMA.bytes / 8, "the version that serves, too"
    engine = pool_memory(plan(apart), "rollout", ROLES, LOADS)
    assert engine is not None and set(engine.residents) == {"actor.generate"}
    assert engine.residents["actor.generate"].idle == {"weights": LLAMA.bytes / 2}
    together = pool_memory(plan(ahead), "train", ROLES, LOADS)
    assert together is not None and "staged weights" not in together.residents["actor.train"].idle


def test_one_copy_serves_both_uses_in_the_same_layout():
    same = plan(Place("train", Mesh.of("fsdp=8"), "hf"), backend="hf")
    found = pool_memory(same, "train", ROLES, LOADS)
    assert found is not None
    assert found.residents["actor.generate"].idle == {} and found.residents["actor.generate"].shares == "actor.train"


def test_a_pool_of_processes_has_no_device_memory():
    assert pool_memory(plan(Place("rollout")), "cpu", ROLES, LOADS) is None
