"""The memory of hosts: what lies there in which phase, and plans whose hosts have too little of it."""

from __future__ import annotations

import random

import pytest

from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.device_specs import KINDS
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.host_memory import FREE_PART, host_room, host_uses
from flowrl.placement.cost.pool_memory import START, PoolMemory, Turn, pool_memory
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import Usage, usage_of
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

LOAD = Workload(128, 1024, 1024)
LLAMA = shape_named("llama-7b")
ACTOR = Role("actor", LLAMA, trains=True, generates=True)


def nodes(count: int, devices: int, memory: float | None = None, kind: str = "h100-80") -> Cluster:
    return Cluster((Nodes(kind, count, devices, host_memory=memory),))


def test_a_kind_has_the_memory_of_its_data_sheet_or_none():
    assert nodes(1, 8).groups[0].host_bytes == 2e12
    assert nodes(1, 4, kind="a100-80").groups[0].host_bytes == 1e12
    assert nodes(1, 8, 3e12).groups[0].host_bytes == 3e12
    assert nodes(1, 8, kind="l40s").groups[0].host_bytes is None
    for name, kind in KINDS.items():
        assert kind.host_memory is None or "host_memory" in kind.sources, name


@pytest.mark.parametrize("memory", [0.0, -1.0, float("inf"), float("nan")])
def test_a_memory_that_holds_nothing_is_refused(memory):
    with pytest.raises(PlanError, match="host_memory"):
        nodes(1, 8, memory)


def test_a_cpu_device_has_no_host_beside_it():
    with pytest.raises(PlanError, match="a cpu device computes in the memory of its host"):
        nodes(1, 8, 1e12, kind="cpu")


def test_who_makes_way_is_in_host_memory_while_others_work():
    """Two that do not fit beside each other: both are away before the first turn, and while they change places."""
    usages = [Usage("a", "train", {"weights": 30.0, "optimizer": 20.0}, {}), Usage("b", "train", {"weights": 40.0}, {})]
    memory = PoolMemory("gpu", "h100-80", 60.0 / 0.95 + 1.5e9 / 0.95, {u.name: u for u in usages})
    turns = [Turn("a.update", ("a.train",)), Turn("a.logprobs", ("a.train",)), Turn("b.update", ("b.train",))]
    phases = memory.hosted(turns)
    both = {"a.train weights": 30.0, "a.train optimizer": 20.0, "b.train weights": 40.0}
    assert phases == {START: both, "a.update": both, "a.logprobs": {"b.train weights": 40.0}, "b.update": both}
    assert memory.most_hosted(turns) == 90.0


def test_of_choices_that_fit_the_devices_one_that_fits_the_host_is_taken():
    """The engine would have one wave more if the trained copy left; the host has no memory for it."""
    actor = Usage("actor", "train", {"optimizer": 30e9}, {})
    ref = Usage("ref", "train", {"weights": 20e9}, {})
    cache = {"kv cache": 60e9}
    engine = Usage("actor", "generate", {"weights": 5e9}, cache, {"kv cache": 1e9}, rows=60, row=1e9)
    turns = [Turn("actor.generate", ("actor.generate",)), Turn("ref.logprobs", ("ref.train",))]
    turns += [Turn("actor.update", ("actor.train",))]

    def away(host: float) -> set[str]:
        return set(PoolMemory("gpu", "h100-80", 80e9, {u.name: u for u in (actor, ref, engine)}, host).swaps(turns))

    assert "actor.train" in away(float("inf"))
    assert away(25e9) == {"ref.train"}
    assert away(1e9) == set()


def test_offloaded_weights_optimizer_gradients_and_staged_versions_are_in_host_memory():
    here = usage_of(ACTOR, "train", Place("a", Mesh.of("fsdp=8"), "fsdp2"), None, LOAD, staging=1)
    away = usage_of(ACTOR, "train", Place("a", Mesh.of("fsdp=8"), "fsdp2", offload=True), None, LOAD, staging=1)
    assert away.idle == {} and "gradients" not in away.working
    assert away.hosted == {**here.idle, "gradients": here.working["gradients"]}
    assert "staged weights" in away.hosted


@pytest.mark.parametrize(("engine", "copies"), [("vllm", 4), ("sglang", 4), ("hf", 0)])
def test_each_replica_of_an_engine_of_its_own_process_has_its_weights_on_the_host_too(engine, copies):
    model = shape_named("qwen3-14b")
    role, cluster = Role("actor", model, generates=True), nodes(1, 4, 137e9, kind="l40s")
    place = Place("gpu", Mesh.of("dp=4"), engine)
    plan = Plan({"gpu": Pool("gpu", devices=tuple(range(4)))}, {"actor": {"generate": place}}, cluster)
    load = Workload(16, 128, 128)
    memory = pool_memory(plan, "gpu", [role], {("actor", "generate"): load})
    assert memory is not None
    turns = [Turn("actor.generate", ("actor.generate",))]
    uses = host_uses(cluster, [("gpu", range(4), memory.hosted(turns))])
    assert [use.need for use in uses] == ([pytest.approx(copies * model.bytes)] if copies else [])
    assert all(use.need > 118e9 and use.error is None for use in uses)
    assert memory.most_hosted(turns) == pytest.approx(copies and model.bytes)


def test_an_engine_that_makes_way_has_its_weights_on_the_host_once():
    place = Place("gpu", Mesh(), "vllm")
    engine = usage_of(Role("judge", LLAMA, generates=True), "generate", place, None, LOAD)
    memory = PoolMemory(
        "gpu", "h100-80", 80e9, {engine.name: engine, "b.train": Usage("b", "train", {"state": 7e10}, {})}
    )
    turns = [Turn("judge.generate", ("judge.generate",)), Turn("b.update", ("b.train",))]
    assert "judge.generate" in memory.swaps(turns)
    for phase in memory.hosted(turns).values():
        assert phase["judge.generate weights"] == LLAMA.bytes


def test_nodes_that_are_alike_are_told_together_and_pools_add_up():
    phases = {START: {"a.train weights": 10.0}, "a.update": {"a.train weights": 4.0}}
    other = {START: {}, "b.update": {"b.train weights": 7.0}}
    uses = host_uses(nodes(3, 4, 1e3), [("a", range(10), phases), ("b", (10, 11), other)])
    assert [(use.nodes, use.need) for use in uses] == [((0, 1), 40.0), ((2,), 2 * 10.0 + 2 * 7.0)]
    assert uses[0].error is None and uses[1].peaks == {"a": START, "b": "b.update"}


def test_what_does_not_fit_is_told_with_its_parts():
    phases = {START: {"a.train weights": 100e9, "a.train optimizer": 150e9, "b.train weights": 1.0}}
    (use,) = host_uses(nodes(2, 8, 2e12), [("gpu", range(16), phases)])
    assert use.error is not None
    assert use.error.what == (
        "each of the nodes 0-1 (h100-80) needs 2000 GB of host memory beside the 10% that stay free, and has 2000 GB:"
        " a.train optimizer 1200, a.train weights 800."
    )


def test_what_nobody_knows_and_what_a_cpu_has_is_not_refused():
    phases = {START: {"a.train weights": 1e15}}
    (use,) = host_uses(nodes(1, 2, kind="l40s"), [("gpu", range(2), phases)])
    assert use.has is None and use.error is None and use.need == 2e15
    assert host_uses(nodes(1, 2, kind="cpu"), [("cpu", range(2), phases)]) == ()


def counted(memory: PoolMemory, turns: list[Turn]) -> float:
    """The most bytes that are away when the turns of two rounds are gone through, whoever leaves before who comes."""
    away = dict(memory.swaps(turns))
    always = sum(sum(usage.hosted.values()) for usage in memory.residents.values())
    most, here = sum(away.values()), set()
    for turn in [*turns, *turns]:
        wanted = {n for r in turn.residents for n in memory.with_shared(r)} & set(away)
        for name in sorted(here - wanted):
            here.remove(name)
        most = max(most, sum(size for name, size in away.items() if name not in here))
        here |= wanted
    return most + always


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_phase_is_that_of_going_through_the_turns(seed):
    chance = random.Random(seed)
    usages = [
        Usage(f"w{i}", "train", {"weights": chance.uniform(1e9, 40e9)}, {"activations": chance.uniform(0, 20e9)})
        for i in range(chance.randint(1, 5))
    ]
    if chance.random() < 0.3:
        usages.append(Usage("x", "train", {}, {}, hosted={"weights": 3e9}))
    memory = PoolMemory("gpu", "h100-80", 80e9, {u.name: u for u in usages})
    turns = [Turn(f"{u.role}.update", (u.name,)) for u in usages]
    chance.shuffle(turns)
    assert memory.most_hosted(turns) == pytest.approx(counted(memory, turns))
    largest = max(sum(parts.values()) for parts in memory.hosted(turns).values())
    assert largest == pytest.approx(memory.most_hosted(turns))


def test_a_pool_knows_what_the_host_of_its_fullest_node_has_for_each_device():
    cluster = nodes(2, 8, 1e12)
    place = {"actor": {"train": Place("a", Mesh.of("fsdp=12"), "fsdp2")}}
    plan = Plan({"a": Pool("a", devices=tuple(range(12)))}, place, cluster=cluster, pipeline=Pipeline())
    memory = pool_memory(plan, "a", [ACTOR], {("actor", "train"): LOAD})
    assert memory is not None and memory.host == host_room(cluster.groups[0]) / 8 == 1e12 * (1 - FREE_PART) / 8
