"""The roofline: each term against its closed form on round numbers, and what must hold for all sizes."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowrl.placement.cluster import device_specs as devices
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.device_specs import DeviceKind
from flowrl.placement.cluster.hardware import Channel, Hardware
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost import communication as traffic
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.length_distribution import Lengths
from flowrl.placement.cost.per_device_counts import (
    optimizer_parameters,
    parameters_on_device,
    parts_of,
    sizes,
    touched_parameters,
)
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import ModelShape, shape_named

#: 1 Tflop/s, 1 TB/s of memory, 100 GB/s inside a node, 10 GB/s outside, 20 GB/s to the host; no latencies.
ROUND = DeviceKind("round", {"bf16": 1e12, "fp32": 5e11}, 80e9, 1e12, 1e11, 0.0, 1e10, 0.0, 2e10)
#: As ROUND, and computing takes no time.
BOUND = DeviceKind("bound", {"bf16": 1e20}, 80e9, 1e12, 1e11, 0.0, 1e10, 0.0, 2e10)
HALF = DeviceKind("half", {"bf16": 5e11, "fp32": 2.5e11}, 40e9, 5e11, 5e10, 0.0, 5e9, 0.0, 1e10)
LATE = DeviceKind("late", {"bf16": 1e12}, 80e9, 1e12, 1e11, 1e-3, 1e10, 1e-2, 2e10)
CPU = DeviceKind("cpu", {"bf16": 1e11, "fp32": 1e11}, 64e9, 1e11, 1e11, 0.0, 1e9, 0.0, 1e11)

#: A million parameters in four layers of one column-parallel weight each: no attention, no vocabulary.
PLAIN = ModelShape.uniform(4, 1000, 250)
#: 4 layers of 8 heads of 16 (4 of them for keys and values): 2 * 4 * 4 * 16 * 2 = 1024 bytes of cache per token.
SMALL = ModelShape("small", 4, 128, 512, 8, 4, 16, 1000)
SPARSE = ModelShape("sparse", 4, 128, 512, 8, 4, 16, 1000, experts=8, experts_per_token=2, expert_intermediate=64)


#: As ROUND, and twice as fast in fp8.
QUICK = replace(ROUND, name="quick", flops={"bf16": 1e12, "fp8": 2e12})
KINDS = {k.name: k for k in (ROUND, BOUND, HALF, LATE, CPU, QUICK)}

with pytest.MonkeyPatch.context() as patch:  # a cluster knows its kinds when it is made
    patch.setattr(devices, "KINDS", KINDS)
    NODES = Cluster((Nodes("round", 2, 8),))
    IDEAL = Roofline(NODES, Efficiency.ideal())
    READING = Roofline(Cluster((Nodes("bound", 2, 8),)), Efficiency.ideal())


@pytest.fixture(autouse=True, scope="module")
def kinds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "KINDS", KINDS)
        Hardware.of.cache_clear()
        yield
    Hardware.of.cache_clear()


def work(kind, mesh="", *, model=PLAIN, load=None, devices=None, **more):
    """A call on the first devices of the cluster."""
    mesh = Mesh.of(mesh)
    role = Role("actor", model, trains=True, **{k: more.pop(k) for k in ("head", "lora", "checkpointing") if k in more})
    devices = tuple(range(mesh.size)) if devices is None else tuple(devices)
    return Work("actor.op", "actor.op", kind, role, load or Workload(8, 500, 500), mesh, devices, **more)


# one device: operations over peak


def test_a_forward_pass_is_two_operations_per_parameter_and_token():
    # 2 * 1e6 parameters * 8 rows * 1000 tokens / 1e12
    assert IDEAL.seconds(work("forward")) == pytest.approx(0.016)


def test_attention_adds_the_square_of_the_length_halved_by_causality():
    model = SMALL
    body = sizes(model).body
    tokens, answered, pairs = 8 * 1000, 8 * 500, 8 * 1000**2 / 2
    operations = 2 * body * tokens + 2 * model.vocab * model.hidden * answered + 4 * 4 * 8 * 16 * pairs
    assert IDEAL.seconds(work("forward", model=model)) == pytest.approx(operations / 1e12)


def test_rows_of_a_group_have_their_prompt_once_where_that_is_less():
    group = Workload(8, 500, 500, group=4)
    once = 2 * 1e6 * 2 * (500 + 4 * 500) / 1e12  # two trees
    assert IDEAL.seconds(work("forward", load=group)) == pytest.approx(once)
    assert IDEAL.seconds(work("forward", load=group, backend="megatron")) == pytest.approx(0.016), "it does not"
    whole = Roofline(NODES, Efficiency.ideal(), shares_prompts=False)
    assert whole.seconds(work("forward", load=group)) == pytest.approx(0.016)


@pytest.mark.parametrize(
    ("prompt", "response", "together"), [(100, 1000, 1), (50, 100, 2), (150, 100, 4), (2000, 100, 8)]
)
def test_so_many_rows_share_a_prompt_as_make_the_least_work(prompt, response, together):
    """Every pair of tokens of a tree is computed, of a row alone the half."""
    body, pair = 2 * sizes(SMALL).body, 4 * 4 * 8 * 16

    def operations(rows: int) -> float:
        tokens = prompt + rows * response
        return 8 / rows * (body * tokens + pair * tokens**2 / (1 if rows > 1 else 2))

    least = min(range(1, 9), key=operations)
    load = Workload(8, prompt, response, group=8)
    head = 2 * SMALL.vocab * SMALL.hidden * 8 * response
    assert IDEAL.seconds(work("forward", model=SMALL, load=load)) == pytest.approx((operations(least) + head) / 1e12)
    assert least == together


def test_rows_share_no_sequence_whose_mask_would_be_too_large():
    fits, longer = (Workload(8, prompt, 100, group=2) for prompt in (7992, 7993))
    body = 2 * 1e6 * 4 / 1e12
    assert IDEAL.seconds(work("forward", load=fits)) == pytest.approx(body * 8192)
    assert IDEAL.seconds(work("forward", load=longer)) == pytest.approx(2 * body * 8093)


def test_training_is_three_forwards_and_four_with_recomputation():
    step = 28 * 1e6 / 1e12  # gradient 2, weight 2, master 2 * 4, moments 2 * 2 * 4 bytes for each parameter
    assert IDEAL.seconds(work("train", checkpointing=False)) == pytest.approx(3 * 0.016 + step)
    assert IDEAL.seconds(work("train", checkpointing=True)) == pytest.approx(4 * 0.016 + step)


def test_adapters_leave_out_the_gradients_of_the_weights():
    few = 28 * 1000 / 1e12
    assert IDEAL.seconds(work("train", checkpointing=False, lora=1000)) == pytest.approx(2 * 0.016 + few)


def test_every_minibatch_of_every_epoch_has_an_optimizer_step():
    terms = IDEAL.terms(work("train", minibatches=4, epochs=2))
    assert terms["optimizer"] == pytest.approx(8 * 28e-6)
    assert terms["compute"] == pytest.approx(2 * 4 * 0.016)


def test_a_prefill_reads_prompts_alone():
    assert IDEAL.terms(work("generate"))["prefill"] == pytest.approx(2 * 1e6 * 8 * 500 / 1e12)


def test_fp32_models_compute_at_the_fp32_peak():
    wide = ModelShape.uniform(4, 250, 1000, dtype_bytes=4)
    assert IDEAL.seconds(work("forward", model=wide)) == pytest.approx(2 * 0.016)


def test_factors_divide_peaks():
    third = Roofline(NODES, Efficiency(forward=0.25, overlap=0))
    assert third.seconds(work("forward")) == pytest.approx(4 * 0.016)


# decode


def test_decode_reads_the_weights_for_every_token_and_the_cache_of_every_row():
    load = Workload(8, 500, 500)
    parts = sizes(SMALL)
    weights = 2 * (parts.body + SMALL.vocab * SMALL.hidden)  # the input embedding is looked up, not read
    cache = 1024 * (500 + 250)  # the mean context
    expected = 500 * (weights + 8 * cache) / 1e12
    assert READING.terms(work("generate", model=SMALL, load=load))["decode"] == pytest.approx(expected)


def test_a_cpu_reads_and_computes_one_after_the_other():
    cpu = Roofline(Cluster((Nodes("cpu", 1, 1),)), Efficiency.ideal())
    reading, computing = 2e6 / 1e11, 2 * 1e6 * 8 / 1e11
    assert cpu.terms(work("generate"))["decode"] == pytest.approx(500 * (reading + computing))


def test_decode_of_many_rows_is_compute_bound():
    load = Workload(4000, 0, 100)
    assert IDEAL.terms(work("generate", load=load))["decode"] == pytest.approx(2 * 1e6 * 4000 * 100 / 1e12)


def test_the_longest_response_decides_how_often_weights_are_read():
    plain = READING.terms(work("generate", load=Workload(8, 0, 100)))["decode"]
    longest = READING.terms(work("generate", load=Workload(8, 0, 100, longest=400)))["decode"]
    assert plain == pytest.approx(100 * 2e6 / 1e12) and longest == pytest.approx(400 * 2e6 / 1e12)


def test_rows_that_the_cache_has_no_room_for_run_in_waves():
    load = Workload(100, 500, 500)
    row = 1024 * 1000
    free = 80e9 - 1.5e9 - 0.05 * 80e9 - SMALL.bytes  # less the reserve and the weights
    call = work("generate", model=SMALL, load=load, held=free - 25.5 * row)
    assert READING.rows_at_once(call) == 25
    weights = 2 * (sizes(SMALL).body + SMALL.vocab * SMALL.hidden)
    expected = (4 * 500 * weights + 100 * 500 * 1024 * 750) / 1e12
    assert READING.terms(call)["decode"] == pytest.approx(expected)


def test_one_row_runs_however_little_memory_there_is():
    assert IDEAL.rows_at_once(work("generate", model=SMALL, held=1e15)) == 1


def test_a_token_costs_a_step_whatever_it_reads():
    busy = Roofline(NODES, Efficiency(step_s=0.01))
    assert busy.terms(work("generate", load=Workload(8, 10, 100)))["steps"] == pytest.approx(1.0)


def test_fewer_kv_heads_than_shards_are_replicated():
    alone, four, eight = (
        IDEAL.rows_at_once(work("generate", mesh, model=SMALL, held=70e9)) for mesh in ("", "tp=4", "tp=8")
    )
    assert four == pytest.approx(4 * alone, rel=0.01) and eight == pytest.approx(four, rel=0.01)


# experts


def test_a_token_meets_the_active_parameters():
    parts = sizes(SPARSE)
    assert parts.all == SPARSE.parameters
    assert parts.experts == 4 * 8 * 3 * 128 * 64
    forward = IDEAL.seconds(work("forward", model=SPARSE))
    active = parts.body + parts.experts / 4
    attention = 4 * 4 * 8 * 16 * 8 * 1000**2 / 2
    assert forward == pytest.approx((2 * active * 8000 + 2 * 128_000 * 4000 + attention) / 1e12)


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2.0), (2, 8 * (1 - 0.75**2)), (1000, 8.0)])
def test_decode_reads_the_experts_that_somebody_chose(rows, chosen):
    role, parts = Role("actor", SPARSE), sizes(SPARSE)
    expected = parts.body + 128_000 + chosen * parts.experts / 8
    assert touched_parameters(role, Mesh(), rows) == pytest.approx(expected)


def test_experts_of_a_group_serve_the_rows_of_all_its_ranks():
    role, parts = Role("actor", SPARSE), sizes(SPARSE)
    expected = parts.body + 128_000 + 8 * (1 - 0.75**4) * parts.experts / 8 / 4
    assert touched_parameters(role, Mesh.of("ep=4"), 1) == pytest.approx(expected)


# several devices: rows, shards, rings


def test_rows_are_split_over_data_axes_and_the_fullest_replica_decides():
    whole = IDEAL.seconds(work("forward"))
    assert IDEAL.seconds(work("forward", "dp=4")) == pytest.approx(whole / 4)
    assert IDEAL.seconds(work("forward", "dp=3")) == pytest.approx(whole * 3 / 8)


def test_a_ring_passes_parts_on():
    channel = Channel(1e9, 1e-3)
    assert channel.all_gather(8e9, 4) == pytest.approx(3 * (1e-3 + 2.0))
    assert channel.all_reduce(8e9, 4) == pytest.approx(2 * 3 * (1e-3 + 2.0))
    assert channel.all_reduce(8e9, 1) == 0 and channel.send(0) == 0


def test_tensor_parallel_all_reduces_activations_twice_a_layer_and_pass():
    # 8000 tokens * 250 * 2 bytes, 2 * 3/4 of it sent, on 4 layers
    once = 4 * 2 * 2 * 3 / 4 * 4e6 / 1e11
    forward, train = IDEAL.terms(work("forward", "tp=4")), IDEAL.terms(work("train", "tp=4"))
    assert forward["compute"] == pytest.approx(0.016 / 4)
    assert forward["exchange"] == pytest.approx(once)
    assert train["exchange"] == pytest.approx(3 * once), "forward, backward, and forward again"


def test_a_group_across_nodes_goes_over_the_network():
    near, far = Hardware(NODES, tuple(range(8))), Hardware(NODES, (0, 8))
    assert near.along(Mesh.of("tp=8"), "tp").bandwidth == 1e11
    assert far.along(Mesh.of("tp=2"), "tp").bandwidth == 1e10
    both = Hardware(NODES, tuple(range(16)))
    assert both.along(Mesh.of("tp=16"), "tp").bandwidth == 8e10, "a ring uses the adapters of all its members"
    assert both.along(Mesh.of("dp=2,tp=8"), "dp").bandwidth == 1e10, "one member of each group in a node"
    assert both.along(Mesh.of("dp=2,tp=8"), "tp").bandwidth == 1e11
    assert both.crosses(Mesh.of("dp=2,tp=8"), "dp") and not both.crosses(Mesh.of("dp=2,tp=8"), "tp")


def test_latency_counts_for_every_message():
    late = Roofline(Cluster((Nodes("late", 1, 4),)), Efficiency.ideal())
    load = Workload(4, 0, 100)
    sums = 100 * 4 * 2  # tokens, layers, all-reduces: of few bytes, so two hops up a tree of 4 ranks and two down
    exchange = late.terms(work("generate", "tp=4", load=load))["exchange"]
    assert exchange == pytest.approx(sums * 2 * (2 * 1e-3 + 4 * 250 * 2 / 1e11))


@pytest.mark.parametrize(("rows", "stages", "micro_batches"), [(8, 2, 2), (8, 4, 4), (2, 4, 2), (64, 4, 64000 / 8192)])
def test_a_pipeline_has_a_bubble(rows, stages, micro_batches):
    terms = IDEAL.terms(work("forward", f"pp={stages}", load=Workload(rows, 500, 500)))
    busy = terms["compute"] + terms["exchange"]
    assert terms["compute"] == pytest.approx(0.002 * rows / stages)
    assert terms["bubble"] == pytest.approx(busy * (stages - 1) / micro_batches)


def test_a_pipeline_does_not_speed_up_what_a_token_reads():
    one, four = (READING.terms(work("generate", m, load=Workload(8, 0, 100)))["decode"] for m in ("", "pp=4"))
    assert four == pytest.approx(one), "every token passes through every stage"


def test_fsdp_gathers_weights_twice_and_scatters_gradients_in_fp32():
    gather = 3 / 4 * 2e6 / 1e11
    assert IDEAL.terms(work("forward", "fsdp=4"))["weights"] == pytest.approx(gather)
    assert IDEAL.terms(work("train", "fsdp=4"))["weights"] == pytest.approx((2 + 4 / 2) * gather)
    many = Workload(4 * 16, 512, 512)  # 16 rows of 1024 tokens: two micro-batches
    assert IDEAL.terms(work("forward", "fsdp=4", load=many))["weights"] == pytest.approx(2 * gather)


def test_replicas_agree_on_gradients_in_fp32_once_a_step():
    ring = 2 * 3 / 4 * 4e6 / 1e11
    assert IDEAL.terms(work("train", "dp=4"))["weights"] == pytest.approx(ring)
    assert IDEAL.terms(work("train", "dp=4", minibatches=2))["weights"] == pytest.approx(2 * ring)
    shared = IDEAL.terms(work("train", "dp=4", backend="megatron"))["weights"]
    assert shared == pytest.approx((4 + 2) / 2 / 4 * ring), "gradients are scattered, and weights gathered in bf16"
    wide = IDEAL.terms(work("train", "dp=4", model=replace(PLAIN, dtype_bytes=4)))["weights"]
    assert wide == pytest.approx(ring), "as those of a model in fp32 are"


def test_computation_hides_part_of_the_traffic_of_weights():
    hides = Roofline(NODES, Efficiency(1, 1, 1, 1, 1, 1, 1, 1, overlap=0.001, step_s=0))
    gather, compute = 3 / 4 * 2e6 / 1e11, 0.016 / 4
    assert hides.terms(work("forward", "fsdp=4"))["weights"] == pytest.approx(gather - 0.001 * compute)
    assert Roofline(NODES).terms(work("forward", "fsdp=4"))["weights"] == 0


def test_a_cpu_hides_no_traffic_as_it_sends_itself():
    hides = Roofline(Cluster((Nodes("cpu", 1, 4),)), replace(Efficiency.ideal(), overlap=1.0))
    assert hides.terms(work("forward", "fsdp=4"))["weights"] == pytest.approx(3 / 4 * 2e6 / 1e11)


def test_recomputation_that_nobody_asked_for_is_that_of_the_efficiencies():
    assumed = work("train", backend="fsdp2")
    assert assumed.role.assumes_recomputation("fsdp2") is False, "a role says it unless its driver is silent"
    silent = work("train", backend="fsdp2", checkpointing=None)
    none = Roofline(NODES, replace(Efficiency.ideal(), recomputation=0.0))
    assert IDEAL.terms(silent)["compute"] == pytest.approx(4 * 0.016)
    assert none.terms(silent)["compute"] == pytest.approx(3 * 0.016)
    assert none.terms(work("train", checkpointing=True))["compute"] == pytest.approx(4 * 0.016), "its driver asked"


def test_the_optimizer_works_on_its_shard():
    step = 28e-6
    assert IDEAL.terms(work("train", "fsdp=4"))["optimizer"] == pytest.approx(step / 4)
    assert IDEAL.terms(work("train", "dp=4"))["optimizer"] == pytest.approx(step)
    assert IDEAL.terms(work("train", "dp=4", backend="megatron"))["optimizer"] == pytest.approx(step / 4)


def test_the_slowest_device_decides():
    mixed = Roofline(Cluster((Nodes("round", 1, 4), Nodes("half", 1, 4))), Efficiency.ideal())
    fast = mixed.seconds(work("forward", "dp=4"))
    assert mixed.seconds(work("forward", "dp=4", devices=(0, 1, 2, 4))) == pytest.approx(2 * fast)


# publish, offload, user code


def test_a_publish_to_other_devices_sends_a_shard_once_to_a_node_where_it_is_passed_on():
    source, to = (Mesh.of("fsdp=8"), tuple(range(8))), tuple(range(8, 16))
    call = work("publish", "dp=4,tp=2", devices=to, source=source, pool="b", source_pool="a")
    assert IDEAL.seconds(call) == pytest.approx(1e6 / 4 / 1e10 + 1e6 * 3 / 4 / 1e11)
    closed = traffic.publish_bytes(call.role, source[0], source[1], call.mesh, to, cluster=NODES)
    assert (closed.between, closed.relayed) == (1e6 / 4, 1e6 * 3 / 4)
    one = work("publish", "tp=8", devices=to, source=source, pool="b", source_pool="a")
    assert IDEAL.seconds(one) == pytest.approx(2e6 / 8 / 1e10), "of one replica a node has everything once"


def test_a_publish_takes_seconds_besides_its_bytes():
    source = (Mesh.of("fsdp=8"), tuple(range(8)))
    call = work("publish", "dp=4,tp=2", devices=range(8, 16), source=source, pool="b", source_pool="a")
    slow = Roofline(NODES, replace(Efficiency.ideal(), publish_s=0.25))
    assert slow.seconds(call) == pytest.approx(IDEAL.seconds(call) + 0.25)
    one = replace(call, source=(Mesh(), ()), devices=(), pool="cpu", source_pool="cpu", mesh=Mesh())
    assert slow.seconds(one) == 0, "workers of one process share their memory"


@pytest.mark.parametrize(
    ("source", "mesh", "best", "row"),
    [
        ("tp=8", "dp=4,tp=2", 3 / 8, 1 / 2),
        ("tp=4,pp=2", "dp=2,tp=4", 1 / 8, 1 / 8),
        ("fsdp=8", "dp=4,tp=2", 3 / 8, 1 / 2),
    ],
)
def test_a_publish_inside_a_pool_fetches_what_is_missing(source, mesh, best, row):
    """The ranks of a run are in a row, where others would have more of what they are to have."""
    same = tuple(range(8))
    call = work("publish", mesh, devices=same, source=(Mesh.of(source), same), pool="a", source_pool="a")
    assert IDEAL.seconds(call) == pytest.approx(row * 2e6 / 1e11)
    for received, part in ((traffic.publish_bytes, best), (traffic.planned_bytes, row)):
        found = received(call.role, Mesh.of(source), same, Mesh.of(mesh), same)
        assert (found.inside, found.between) == (pytest.approx(part * 2e6), 0.0)


def test_a_publish_takes_as_long_as_the_busiest_sender():
    """One rank that trains, eight that generate with whole models: it sends each of four weights to one of them."""
    source, to = (Mesh(), (0,)), tuple(range(8, 16))
    call = work("publish", "dp=8", devices=to, source=source, pool="b", source_pool="a")
    assert IDEAL.seconds(call) == pytest.approx(2e6 / 1e10 + 7 * 2e6 / 4 / 1e11)
    beside = work("publish", "dp=7", devices=range(1, 8), source=source, pool="b", source_pool="a")
    assert IDEAL.seconds(beside) == pytest.approx(7 * 2e6 / 1e11)


def test_bytes_inside_a_node_and_between_nodes_move_at_the_same_time():
    """Two senders in two nodes: who is in the node of a holder takes it from there."""
    source, to = (Mesh.of("dp=2"), (0, 8)), (1, 2, 9)
    call = work("publish", "dp=3", devices=to, source=source, pool="b", source_pool="a")
    found = traffic.planned_bytes(call.role, source[0], source[1], Mesh.of("dp=3"), to, cluster=NODES)
    assert (found.inside, found.between) == (2 * 2e6, 0.0)
    assert IDEAL.seconds(call) == pytest.approx(2 * 2e6 / 1e11)


@pytest.mark.parametrize(("source", "mesh"), [("tp=8", "dp=4,tp=2"), ("fsdp=8", "dp=4,tp=2"), ("dp=2,tp=4", "tp=8")])
def test_the_closed_form_of_a_publish_is_near_the_plan_and_never_above_it(source, mesh):
    model, same = shape_named("llama-7b"), tuple(range(8))
    role = Role("actor", model)
    closed, planned = (
        received(role, Mesh.of(source), same, Mesh.of(mesh), same)
        for received in (traffic.publish_bytes, traffic.planned_bytes)
    )
    assert 0 <= planned.inside - closed.inside * (1 - 1e-3) <= 0.14 * model.bytes


def test_adapters_are_merged_on_their_way():
    """A run moves all weights of an actor with adapters, and the forecast says so."""
    move = Mesh.of("fsdp=8"), tuple(range(8)), Mesh.of("dp=4,tp=2"), tuple(range(8))
    for received in (traffic.publish_bytes, traffic.planned_bytes):
        adapted, whole = (received(Role("a", shape_named("llama-7b"), lora=n), *move) for n in (1_000_000, 0))
        assert adapted == whole and whole.inside > 4e9


def test_bytes_of_a_publish_may_come_from_elsewhere():
    source, to = (Mesh.of("tp=8"), tuple(range(8))), tuple(range(8, 16))

    def told(role, mesh, devices, *_):
        return traffic.Passing(between=1e9 * len(devices))

    planned = Roofline(NODES, Efficiency.ideal(), received=told)
    assert planned.seconds(work("publish", "tp=8", devices=to, source=source)) == pytest.approx(8e9 / 1e10)


def test_a_publish_into_the_same_layout_moves_nothing():
    same = tuple(range(8))
    assert IDEAL.seconds(work("publish", "tp=8", source=(Mesh.of("tp=8"), same))) == 0


def test_offload_and_onload_go_through_the_host():
    assert IDEAL.seconds(work("offload", moved=40e9)) == pytest.approx(2.0)
    assert IDEAL.seconds(work("onload", moved=40e9)) == pytest.approx(2.0)


def test_user_code_takes_the_time_given_for_a_row():
    reward = Work("reward.score", "reward.score", "external", Role("reward"), Workload(10, 1, 1), processes=4)
    assert Roofline(None, row_seconds={"reward.score": 2.0}).seconds(reward) == pytest.approx(3 * 2.0)
    assert Roofline(None, Efficiency(row_s=0.5)).seconds(reward) == pytest.approx(1.5)


def test_nothing_costs_nothing():
    assert IDEAL.seconds(work("none")) == 0
    assert IDEAL.seconds(work("forward", load=Workload(0, 1, 1))) == 0
    assert IDEAL.source == "roofline"


def test_a_pool_of_processes_is_as_many_cpus():
    call = Work("a.f", "a.f", "forward", Role("a", PLAIN), Workload(8, 500, 500), processes=4)
    assert Roofline(None, Efficiency.ideal()).seconds(call) == pytest.approx(0.016 * 10 / 4)


def test_every_factor_says_where_it_is_from():
    default = Efficiency()
    assert set(default.sources) == {n for n in vars(default) if n not in ("sources", "name", "error")} and all(
        default.sources.values()
    )


# what holds for all

ROWS, TOKENS = st.integers(1, 3000), st.integers(1, 8000)
MODELS = st.sampled_from([PLAIN, SMALL, SPARSE])
MESHES = st.sampled_from(
    ["", "dp=4", "fsdp=8", "tp=4", "pp=4", "pp=2,dp=2,tp=4", "cp=2,tp=2", "ep=4", "dp=2,ep=2,tp=2"]
)
CALLS = st.sampled_from(["generate", "forward", "train"])


@given(CALLS, MESHES, MODELS, ROWS, TOKENS, TOKENS, st.integers(0, 500), st.floats(0, 90e9))
def test_more_is_never_faster(kind, mesh, model, rows, prompt, response, more, held):
    roofline = Roofline(NODES)
    base = roofline.seconds(work(kind, mesh, model=model, load=Workload(rows, prompt, response), held=held))
    for load in (
        Workload(rows + more, prompt, response),
        Workload(rows, prompt + more, response),
        Workload(rows, prompt, response + more),
        Workload(rows, prompt, response, longest=response + more),
    ):
        assert roofline.seconds(work(kind, mesh, model=model, load=load, held=held)) >= base * (1 - 1e-9)
    fuller = roofline.seconds(
        work(kind, mesh, model=model, load=Workload(rows, prompt, response), held=held + more * 1e8)
    )
    assert fuller >= base * (1 - 1e-9)


@given(CALLS, MODELS, ROWS, TOKENS, TOKENS, st.sampled_from(["dp", "fsdp", "tp", "pp", "cp"]), st.integers(0, 3))
def test_more_devices_never_compute_for_longer(kind, model, rows, prompt, response, axis, power):
    """By computation alone: what they have to tell each other is another matter, and so is a stage with more layers."""
    assume(axis != "pp" or model.layers % 2 ** (power + 1) == 0)
    load, parts = Workload(rows, prompt, response), ("compute", "decode", "steps", "optimizer")
    few, many = (IDEAL.terms(work(kind, f"{axis}={n}", model=model, load=load)) for n in (2**power, 2 ** (power + 1)))
    assert sum(many.get(p, 0) for p in parts) <= sum(few.get(p, 0) for p in parts) * (1 + 1e-9)


@given(MESHES, MODELS, ROWS, TOKENS, TOKENS)
def test_terms_are_seconds_and_add_up(mesh, model, rows, prompt, response):
    for kind in ("generate", "forward", "train"):
        call = work(kind, mesh, model=model, load=Workload(rows, prompt, response))
        terms = Roofline(NODES).terms(call)
        assert all(s >= 0 for s in terms.values())
        assert Roofline(NODES).seconds(call) == pytest.approx(sum(terms.values()))


@pytest.mark.parametrize("name", ["llama-7b", "llama-70b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_parts_of_shipped_models_add_up(name):
    model = shape_named(name)
    assert sizes(model).all == model.parameters
    assert min(sizes(model).body, sizes(model).embedding) > 0
    tied_or_not = model.vocab * model.hidden * (1 if model.tied else 2)
    assert sizes(model).embedding + sizes(model).head == tied_or_not


def test_folded_experts_take_the_memory_and_the_traffic_of_their_own_mesh():
    """Qwen3-235B as NVIDIA NeMo-RL trains it on 128 H100: tp=4, pp=8, ep=16 over the ranks of dp and tp."""
    role, load = Role("actor", shape_named("qwen3-235b-a22b"), trains=True), Workload(512, 1024, 3072)
    costs, devices = Roofline(Cluster.of("round:16x8")), tuple(range(128))
    folded, plain = Mesh.of("pp=8,dp=4,tp=4,folded_ep=16"), Mesh.of("pp=8,dp=4,tp=4")
    sizes = {m: parameters_on_device(role, m) for m in (folded, plain)}
    parts, layers = parts_of(role), 94 / 12
    assert sizes[folded] == pytest.approx((parts.dense / 4 + parts.experts / 16) / layers)
    assert sizes[plain] == pytest.approx((parts.dense + parts.experts) / 4 / layers)
    works = {m: Work("u", "u", "train", role, load, m, devices, backend="megatron") for m in (folded, plain)}
    assert all(costs.terms(works[m])["compute"] == costs.terms(works[plain])["compute"] for m in works)
    hardware = costs.hardware(works[folded])
    assert traffic.tensor_parallel(works[folded], hardware, 8192) * 2 == traffic.tensor_parallel(
        works[plain], hardware, 8192
    )
    assert (
        traffic.expert_parallel(works[folded], hardware, 8192)
        > 0
        == traffic.expert_parallel(works[plain], hardware, 8192)
    )
    assert optimizer_parameters(role, folded, "megatron") == pytest.approx(
        parts.dense / 4 / layers / 4 + parts.experts / 16 / layers
    )


# fp8


def test_weights_in_fp8_are_read_in_half_the_time_and_keys_and_values_take_half_the_room():
    load = Workload(8, 1000, 1000)
    plain = work("generate", model=SMALL, load=load)
    part = parts_of(plain.role)
    layers = part.body
    found = {word: READING.terms(replace(plain, **{word: True}))["decode"] for word in ("fp8_weights", "fp8_cache")}
    reading, cache = 2 * touched_parameters(plain.role, plain.mesh, 8), 8 * SMALL.kv_bytes_per_token * 1500
    whole = READING.terms(plain)["decode"]
    assert whole == pytest.approx(1000 * (reading + cache) / 1e12)
    assert found["fp8_cache"] == pytest.approx(1000 * (reading + cache / 2) / 1e12)
    average = (layers + 2 * (part.all - layers)) / part.all
    assert found["fp8_weights"] == pytest.approx(1000 * (reading * average / 2 + cache) / 1e12)
    room = READING.rows_at_once(plain)
    assert READING.rows_at_once(replace(plain, fp8_cache=True)) in (2 * room, 2 * room + 1)
    assert READING.rows_at_once(replace(plain, fp8_weights=True)) >= room


def test_an_fp8_engine_computes_at_the_peak_of_fp8_where_the_device_has_one():
    plain = work("generate", load=Workload(8, 1000, 0))
    there = Roofline(Cluster((Nodes("quick", 1, 8),)), Efficiency.ideal())
    assert there.seconds(plain) == pytest.approx(2 * there.seconds(replace(plain, fp8_weights=True)))
    assert IDEAL.seconds(plain) == IDEAL.seconds(replace(plain, fp8_weights=True))


def test_an_engine_that_is_kept_full_takes_what_its_largest_batch_takes_for_each_token():
    lengths = Lengths(16, 4096, "lognormal", (256.0, 1.0))
    for rows in (64, 1000, 4096):
        load = Workload(rows, 16, lengths.mean, lengths.longest(rows), lengths)
        work = Work("a", "a", "generate", Role("a", SMALL), load, Mesh.of("dp=4"), tuple(range(4)))
        alone, full = IDEAL.seconds(work), replace(IDEAL, steady=True).seconds(work)
        assert 0 < full < alone, "the longest rows run beside others"
        least = min(IDEAL.token_seconds(work, n) / n for n in range(1, rows // 4 + 1))
        assert full == pytest.approx(IDEAL.terms(work)["prefill"] + rows / 4 * lengths.mean * least, rel=0.01)
    fixed = replace(load, lengths=None, longest=0.0)
    assert replace(IDEAL, steady=True).seconds(replace(work, load=fixed)) == IDEAL.seconds(replace(work, load=fixed))
