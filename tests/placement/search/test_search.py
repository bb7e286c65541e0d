# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""The search with models, meshes, memory and costs. The abstract search is in test_branch_and_bound.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from brute_search import brute
from hybridflow import SHAPES, ordering, ppo

from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.device_specs import KINDS
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.cost_model import GivenCosts, Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.plan.plan import Plan, Pool
from flowrl.placement.search.abstract_problem import Asked
from flowrl.placement.search.candidate_meshes import meshes
from flowrl.placement.search.explanation import explain, shape, to_json
from flowrl.placement.search.find_placement import error_of, search, search_shapes
from flowrl.placement.search.problem import Member, Problem
from flowrl.placement.search.step_time import Op, Placed, PoolUse, Sent, changes

TINY = ModelShape("tiny", 4, 64, 128, 4, 2, 16, 256)


def grpo(
    cluster: str, model: str | ModelShape = "qwen3-8b", *, rows: int = 512, response: int = 1024, **more
) -> Problem:
    """Generate, a reward on the host, a reference, an update."""
    shape = shape_named(model) if isinstance(model, str) else model
    load = Workload(rows, 512, response)
    actor, ref, reward = Role("actor", shape, trains=True, generates=True), Role("ref", shape), Role("reward")
    generate = Work("actor.generate#1", "actor.generate", "generate", actor, load)
    update = Work("actor.update#1", "actor.update", "train", actor, load, minibatches=4)
    logprobs = Work("ref.logprobs#1", "ref.logprobs", "forward", ref, load)
    score = Work("reward.score#1", "reward.score", "external", reward, load)
    return Problem(
        Cluster.of(cluster),
        (
            Member(actor, "train", (update,)),
            Member(actor, "generate", (generate,)),
            Member(ref, "train", (logprobs,)),
            Member(reward, "train", (score,), processes=8),
        ),
        stages=((generate.node,), (logprobs.node, score.node), (update.node,)),
        pairs=(("actor.train", "actor.generate"),),
        **more,
    )


def ppo_13b(cluster: str, **more) -> Problem:
    return ppo(Cluster.of(cluster), actor=shape_named("llama-13b"), critic=shape_named("llama-13b"), **more)


@pytest.fixture(scope="module")
def found_13b():
    problem = ppo_13b("a100-80:2x8")
    return search(problem, Roofline(problem.cluster))


@pytest.fixture(scope="module")
def found_async():
    problem = grpo("h100-80:2x8", staleness=(0, 1))
    return search(problem, Roofline(problem.cluster))


# HybridFlow, section 8.3


@pytest.mark.parametrize("actor,critic", [("llama-13b", ""), ("llama-34b", ""), ("llama-13b", "llama-70b")])
@pytest.mark.parametrize("devices", [16, 32, 64])
def test_colocated_is_best_on_16_to_64_a100(actor, critic, devices):
    found = ordering(devices, actor=actor, critic=critic)
    if devices == 16 and critic:  # 18 bytes for each of 69e9 parameters that are trained, gradients in fp32
        assert not found.seconds, "16 devices of 80 GB have no room for it"
        return
    assert found.fastest == "colocate"
    assert [name for name, _ in found.seconds] == ["colocate", "split", "standalone"][: len(found.seconds)]
    assert found.margin > 0


@pytest.mark.parametrize("devices", [96, 128])
@pytest.mark.parametrize("critic", ["", "llama-70b"])
def test_a_roofline_does_not_decide_on_96_and_more(devices, critic):
    found = ordering(devices, critic=critic)
    assert not found.decided
    assert str(found).endswith("HybridFlow measured a split to be as fast or faster here: a roofline does not decide.")


def test_the_advantage_of_colocation_shrinks_with_devices():
    """13B against standalone, as the models' fixed costs weigh more on more devices."""
    few, many = ordering(16), ordering(128)
    assert dict(few.seconds)["standalone"] / few.seconds[0][1] > dict(many.seconds)["standalone"] / many.seconds[0][1]


def test_the_search_agrees_with_the_named_shapes():
    problem = ppo_13b("a100-80:4x8")
    costs = Roofline(problem.cluster)
    best = search(problem, costs, why=False)
    by_name = search_shapes(problem, costs, SHAPES)
    assert best.step_seconds == min(p.step_seconds for p in by_name.values() if p is not None)


@pytest.mark.parametrize("staleness", [(0,), (0, 1)])
def test_equals_brute_force_with_real_costs(staleness):
    """Every partition and allocation of five uses on 16 devices, publishes and memory included."""
    problem = ppo_13b("a100-80:2x8", staleness=staleness)
    asked = Asked(problem, Roofline(problem.cluster))
    best, second, count = brute(asked.question(), asked.table)
    found = search(problem, Roofline(problem.cluster), why=False)
    assert (found.step_seconds, found.runner_up.step_seconds) == pytest.approx((best, second), rel=1e-12)
    assert found.evaluated < count


def test_four_models_on_128_devices_with_real_costs():
    """Bounds leave few of the many plans to be priced: seconds on one core."""
    problem = ppo_13b("a100-80:16x8")
    found = search(problem, Roofline(problem.cluster))
    assert 0 < found.evaluated < 60 and found.pruned > 300


# what is found


def test_plan_is_valid_and_loads_again(found_13b, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(found_13b.plan.to_yaml())
    again = Plan.load(path)
    assert again == found_13b.plan
    for worker, use, place in again.roles():
        assert place.mesh.size == again.pool_of(worker, use).size
    assert again.devices("actor", "train") == tuple(range(16))
    assert [sorted(members) for members in found_13b.best.sets] == [
        ["actor.generate", "actor.train", "critic.train", "ref.train", "reward.train"]
    ]


def test_pools_fill_nodes_or_stay_inside_one(found_async, found_13b):
    for found in (found_async, found_13b):
        for placed in (found.best, found.runner_up):
            cluster = placed.plan.cluster
            for pool in placed.pools:
                nodes = {cluster.node(d) for d in pool.devices}
                assert len(nodes) <= 1 or all(set(cluster.devices_of(n)) <= set(pool.devices) for n in nodes)
                assert pool.devices == tuple(range(pool.devices[0], pool.devices[-1] + 1)) if pool.devices else True


def test_seconds_are_those_of_the_search(found_13b, found_async):
    for found in (found_13b, found_async):
        for placed in (found.best, found.runner_up):
            assert placed.seconds() == pytest.approx(placed.step_seconds, rel=1e-9)
            assert max(placed.busy.values()) <= placed.step_seconds * (1 + 1e-9)
        assert found.margin >= 0 and found.runner_up.sets != found.best.sets
        assert 0 < found.best.bottleneck.share <= 1


def test_changes_put_the_two_level(found_async):
    assert found_async.changes
    for change in found_async.changes:
        factor = {change.title: change.factor}
        assert found_async.runner_up.seconds(factor) == pytest.approx(found_async.best.seconds(factor), rel=1e-6)


def test_chosen_plans_fit_in_memory(found_13b):
    from flowrl.placement.cost.pool_memory import Turn, pool_memory

    problem = found_13b.problem
    loads = {(m.role.name, m.use): m.works[0].load for m in problem.members}
    roles = {m.role.name: m.role for m in problem.members}
    turns = [Turn(w.title, (m.name,)) for m in problem.members for w in m.works]
    for pool in found_13b.plan.pools:
        memory = pool_memory(found_13b.plan, pool, roles.values(), loads)
        assert memory is not None and memory.fits(turns) is None


def test_host_work_takes_no_devices(found_async):
    plan = found_async.plan
    assert plan.pools["cpu"] == Pool("cpu", processes=8) and plan.pool("reward") == "cpu"
    assert found_async.best.busy["cpu"] == pytest.approx(512 / 8 * 1e-2)


# staleness and kinds of devices


def test_staleness_overlaps_steps(found_async):
    """Decoding beside training: never slower than one step after another, and by the closed form."""
    problem = found_async.problem
    costs = Roofline(problem.cluster)
    apart = (("actor.generate",), ("actor.train", "ref.train"))
    overlapped = search_shapes(replace(problem, staleness=(1,)), costs, {"apart": apart})["apart"]
    sequential = search_shapes(replace(problem, staleness=(0,)), costs, {"apart": apart})["apart"]
    assert overlapped.staleness == 1 and overlapped.step_seconds < sequential.step_seconds
    stages = [max(p.by_stage(3, {})[i] for p in overlapped.pools) for i in range(3)]
    latency = sum(stages) + sum(s.seconds for s in overlapped.sent)
    assert overlapped.step_seconds == pytest.approx(max(*overlapped.busy.values(), latency / 2))
    assert found_async.step_seconds <= search(replace(problem, staleness=(0,)), costs, why=False).step_seconds


def test_more_staleness_is_not_chosen_for_nothing():
    """Two pools overlap fully at 1; 4 gains nothing and is left."""
    problem = grpo("h100-80:2x8", staleness=(1, 4))
    found = search(problem, Roofline(problem.cluster), why=False)
    assert found.best.staleness in (0, 1)


@pytest.mark.parametrize("cluster", ["h100-80:1x8+lean:1x8", "lean:1x8+h100-80:1x8"])
def test_decoding_goes_where_memory_is_fast(cluster, monkeypatch):
    """Of an H100 and a kind with a seventh of its operations and 1.2 times its bandwidth, wherever it stands."""
    lean = replace(KINDS["h100-80"], name="lean", flops={"bf16": 148e12, "fp32": 44e12}, bandwidth=4e12, memory=96e9)
    monkeypatch.setitem(KINDS, "lean", lean)
    problem = grpo(cluster, staleness=(0, 1))
    plan = search(problem, Roofline(problem.cluster), why=False).plan
    kinds = {use: {plan.cluster.kind(d).name for d in plan.devices("actor", use)} for use in ("train", "generate")}
    assert kinds == {"train": {"h100-80"}, "generate": {"lean"}}
    for pool in plan.pools.values():
        assert len({plan.cluster.kind(d).name for d in pool.devices}) <= 1


def test_what_takes_longest_gets_the_better_devices():
    """An H200 is an H100 with faster and larger memory: long responses are made there, short ones trained there."""
    for response, use in ((8192, "generate"), (512, "train")):
        problem = grpo("h100-80:1x8+h200:1x8", response=response, staleness=(0, 1))
        plan = search(problem, Roofline(problem.cluster), why=False).plan
        assert {plan.cluster.kind(d).name for d in plan.devices("actor", use)} == {"h200"}


# odd


def test_one_device_and_one_model():
    model = shape_named("qwen3-0.6b")
    actor = Role("actor", model, trains=True)
    update = Work("actor.update#1", "actor.update", "train", actor, Workload(8, 64, 64))
    problem = Problem(Cluster.of("h100-80:1x1"), (Member(actor, "train", (update,)),), ((update.node,),))
    found = search(problem, Roofline(problem.cluster))
    assert found.runner_up is None and found.margin is None and not found.tie and found.changes == ()
    assert found.plan.devices("actor") == (0,)
    assert "Runner-up: none" in explain(found)


def test_more_uses_than_devices_share():
    problem = grpo("h100-80:1x1", "qwen3-0.6b", rows=16)
    found = search(problem, Roofline(problem.cluster), why=False)
    assert found.best.sets == (("actor.train", "ref.train", "actor.generate"),)
    assert found.runner_up is None


def test_work_on_the_host_alone():
    reward = Role("reward")
    score = Work("reward.score#1", "reward.score", "external", reward, Workload(64, 8, 8))
    problem = Problem(Cluster.of("h100-80:1x8"), (Member(reward, "train", (score,), processes=4),), ((score.node,),))
    found = search(problem, Roofline(problem.cluster))
    assert found.step_seconds == pytest.approx(16 * 1e-2)
    assert found.best.bottleneck.title == "reward.score"


def test_uses_that_stay_together():
    problem = grpo("h100-80:2x8", staleness=(0, 1), together=(("actor.train", "actor.generate"),))
    found = search(problem, Roofline(problem.cluster), why=False)
    for placed in (found.best, found.runner_up):
        assert any({"actor.train", "actor.generate"} <= set(s) for s in placed.sets)
        assert placed.staleness == 0


def test_a_backend_that_is_asked_for():
    problem = grpo("h100-80:2x8")
    members = tuple(replace(m, backend="megatron") if m.use == "train" and m.role.model else m for m in problem.members)
    plan = search(replace(problem, members=members), Roofline(problem.cluster), why=False).plan
    assert plan.backend("actor", "train") == "megatron" and plan.place_of("actor")


def test_a_mixture_of_experts():
    problem = grpo("h100-80:4x8", "qwen3-30b-a3b", rows=256)
    sparse = Role("actor", shape_named("qwen3-30b-a3b"), trains=True)
    assert {1, 8, 32} <= {m["ep"] for m, _ in meshes(sparse, "train", 32, node=8)}, "experts go beyond a node"
    dense = grpo("h100-80:4x8", "qwen3-32b", rows=256)
    sparse_s, dense_s = (search(p, Roofline(p.cluster), why=False).step_seconds for p in (problem, dense))
    assert sparse_s < dense_s  # a tenth of the parameters takes part in a token


def test_a_machine_without_gpus():
    problem = grpo("cpu:1x2", TINY, rows=8, response=32)
    plan = search(problem, Roofline(problem.cluster), why=False).plan
    assert {place.backend for _, _, place in plan.roles()} <= {"hf", "fsdp2"}


# bad


def test_nothing_fits_names_the_culprit_and_what_would_do():
    with pytest.raises(PlanError) as caught:
        search(grpo("h100-80:1x8", "llama-70b"), Roofline(Cluster.of("h100-80:1x8")))
    assert "actor.train does not fit on h100-80:1x8, not even alone." in str(caught.value)
    assert caught.value.fix == "It would fit on 24 h100-80."
    larger = grpo("h100-80:3x8", "llama-70b")
    assert search(larger, Roofline(larger.cluster), why=False).step_seconds > 0


def test_too_many_uses():
    model = shape_named("qwen3-0.6b")
    members = []
    for i in range(9):
        role = Role(f"ref{i}", model)
        members.append(Member(role, "train", (Work(f"ref{i}.f#1", f"ref{i}.f", "forward", role, Workload(1, 1, 1)),)))
    problem = Problem(Cluster.of("h100-80:1x8"), tuple(members), (tuple(m.works[0].node for m in members),))
    with pytest.raises(PlanError, match="9 uses to place apart or together are too many: 8 at most"):
        search(problem, Roofline(problem.cluster))
    some = replace(problem, together=(tuple(m.name for m in members[:7]),))
    assert search(some, Roofline(problem.cluster), why=False).step_seconds > 0


@pytest.mark.parametrize(
    "change,words",
    [
        ({"pairs": (("actor.tran", "actor.generate"),)}, "Did you mean 'actor.train'"),
        ({"stages": (("actor.generate#1",), ("actor.update#1",))}, "is no call of the stages"),
        ({"stages": (("actor.generate#1", "actor.generate#1"),)}, "is there twice"),
        ({"staleness": ()}, "is nothing to choose from"),
        ({"together": (("critic.train",),)}, "is no member"),
    ],
)
def test_a_problem_that_contradicts_itself(change, words):
    with pytest.raises(PlanError, match=words):
        replace(grpo("h100-80:1x8"), **change)


def test_shapes_that_are_no_partition():
    problem = grpo("h100-80:1x8")
    with pytest.raises(PlanError, match="no partition"):
        search_shapes(problem, Roofline(problem.cluster), {"x": (("actor.train",),)})


# how sure it is


@dataclass(frozen=True)
class Measured:
    """The roofline's seconds, said to be right to 0.1 %."""

    roofline: Roofline
    error: float = 0.001
    source: str = "calibrated: runs/1 (error 0.1 %)"

    def seconds(self, work):
        return self.roofline.seconds(work)


def test_a_margin_inside_the_error_is_a_tie(found_13b):
    assert found_13b.error == 0.30 and found_13b.tie
    text = explain(found_13b)
    assert "A tie: the margin of" in text
    assert shape(found_13b.best) in text and shape(found_13b.runner_up) in text
    assert "roofline, not calibrated, taken as right to ±30% (assumed)" in text
    measured = search(found_13b.problem, Measured(Roofline(found_13b.problem.cluster)))
    assert measured.margin == found_13b.margin and not measured.tie
    assert "outside the error of the costs" in explain(measured) and "A tie" not in explain(measured)


def test_explains_in_plain_words(found_async):
    text = explain(found_async)
    for words in ("per step on h100-80:2x8", "Bottleneck:", "Binding constraint:", "Runner-up:", "allocations"):
        assert words in text
    assert "Beyond 64 devices" not in text
    large = ppo_13b("a100-80:12x8")
    assert "Beyond 64 devices measurements have contradicted a roofline" in explain(
        search(large, Roofline(large.cluster), why=False)
    )


def test_the_same_as_a_record(found_async):
    record = to_json(found_async)
    assert json.loads(json.dumps(record)) == record
    assert record["step_s"] == found_async.step_seconds and record["plan"] == found_async.plan.to_json()
    assert record["tie"] == found_async.tie and record["runner_up"]["margin"] == found_async.margin


def test_binding_constraints():
    """An actor that fits one device only with room for few rows at once is bound by memory."""
    problem = grpo("l40s:1x4", "qwen3-4b", rows=512, response=4096)
    found = search(problem, Roofline(problem.cluster))
    assert found.binding == "memory" and found.gain > 0.005
    assert "Binding constraint: memory" in explain(found)


def test_given_costs_are_exact():
    """Given seconds do not depend on devices: any split overlaps what one pool would do in turns."""
    costs = GivenCosts({"actor.generate": 6.0, "ref.logprobs": 1.0, "reward.score": 2.0, "actor.update": 3.0})
    assert error_of(costs) == 0.0
    found = search(grpo("h100-80:1x8"), costs, why=False)
    assert found.step_seconds == pytest.approx(6 + 2 + 3)
    overlapped = search(grpo("h100-80:1x8", staleness=(0, 1)), costs, why=False)
    assert overlapped.step_seconds == pytest.approx(6.0) and overlapped.best.staleness == 1


def test_changes_of_two_placements():
    """By hand: 10 s against 8 s of a and 4 s of b; b has to fall to a half."""

    def placed(*ops: Op) -> Placed:
        plan = Plan()
        one = Placed(plan, (PoolUse("p", "h100-80", (0,), {"m.train": ""}, ops),), (Sent("x.publish", "p", 0.0),), 1, 0)
        return replace(one, step_seconds=one.seconds())

    level = changes(placed(Op("a", 0, 10.0)), placed(Op("a", 0, 8.0), Op("b", 0, 4.0)))
    assert {c.title: c.factor for c in level} == pytest.approx({"a": 2.0, "b": 0.5})


# meshes


def test_meshes_divide_the_model():
    role = Role("actor", shape_named("llama-13b"), trains=True)  # 40 heads, 40 layers
    found = {str(m) for m, _ in meshes(role, "train", 16, node=8)}
    assert {"fsdp=16", "fsdp=8,tp=2", "fsdp=2,tp=8", "dp=2,fsdp=8", "pp=2,tp=8", "dp=16"} <= found
    assert not any(m["tp"] > 8 or m["tp"] == 3 for m, _ in meshes(role, "train", 48, node=8))
    assert all(m.size == 24 for m, _ in meshes(role, "generate", 24, node=8))
    assert list(meshes(role, "train", 2, node=8, backend="hf")) == [], "it trains on one device"
    assert [(m, b) for m, b in meshes(role, "generate", 1, node=1)] == [(Mesh(), "vllm")]


def test_stages_of_a_pipeline_lie_anywhere_and_need_not_be_even():
    found = {str(m) for m, _ in meshes(Role("a", shape_named("qwen3-235b-a22b"), trains=True), "train", 32, node=8)}
    assert {"pp=8,tp=4", "pp=4,dp=8", "pp=2,ep=16"} <= found, "94 layers, and stages inside a node"


def test_a_row_that_is_split_is_among_them_where_it_is_asked_for():
    role = Role("actor", shape_named("llama-13b"), trains=True)
    assert {m["cp"] for m, _ in meshes(role, "train", 16, node=8, cp=True)} == {1, 2, 4, 8}
    assert {m["cp"] for m, _ in meshes(role, "train", 16, node=8)} == {1}


def test_what_a_backend_refuses_is_not_proposed():
    """Adapters are split by no tp, and frozen weights by no pp: flowrl check says so of a plan by hand."""
    model = shape_named("qwen3-8b")
    adapters = {m for m, _ in meshes(Role("a", model, trains=True, lora=10**7, frozen=1.0), "train", 8, node=8)}
    assert adapters and all(set(m.axes) <= {"dp", "fsdp"} for m in adapters)
    frozen = [m for m, _ in meshes(Role("a", model, trains=True, frozen=0.5), "train", 8, node=8)]
    assert frozen and all(m["pp"] == 1 for m in frozen)
