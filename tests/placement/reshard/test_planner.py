import time
from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shapes

from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.model.weight_layout import Layout
from flowrl.placement.reshard.planner import plan_reshard

DENSE, EXPERTS = shapes(5)


def elements(layout, rank):
    """Every number that a rank holds, as (name, index): the oracle counts these sets."""
    return {(w.name, at) for w, box in layout.holds(rank) for at in product(*(range(a, b) for a, b in box))}


def sets(move):
    """What each device has before and is to have, as sets of numbers."""
    old = {d: elements(move.src, rank) for rank, d in enumerate(move.src_devices)}
    new = {d: elements(move.dst, rank) for d, rank in zip(move.devices, move.ranks, strict=True)}
    return old, new


def nested(whole):
    return [n for n in range(1, whole + 1) if whole % n == 0]


def of_mesh(**axes):
    return Mesh(axes)


# ---- the formulas of HybridFlow, table 2 --------------------------------------------------------------------------

#: 840 is the least common multiple of 1 to 8: every part has the same size.
UNIFORM = ModelShape.uniform(layers=840, columns=840)


@pytest.mark.parametrize("t", range(1, 9))
def test_nested_meshes_give_the_formulas_of_hybridflow(t):
    whole = int(UNIFORM.bytes)
    for p, d in product(range(1, 9), range(1, 9)):
        src = of_mesh(tp=t, pp=p, dp=d)
        for t_g, p_g in product(nested(t), nested(p)):
            dst = of_mesh(tp=t_g, pp=p_g)
            received = (t * p - t_g * p_g) * whole // (t_g * p_g * t * p)
            for grouping in ("overlap", "hybridflow"):
                move = plan_reshard(UNIFORM, src, dst, grouping=grouping)
                assert set(move.received) == {received}, (src, dst)
                assert set(move.peak) == {whole // (t_g * p_g)}, (src, dst)
                assert set(move.redundant) == {0}, (src, dst)


def test_gathering_gives_the_formulas_of_the_others():
    whole = int(UNIFORM.bytes)
    for t, p, d in product((1, 2, 3, 4, 8), (1, 2, 5), (1, 2)):
        for t_g, p_g in product(nested(t), nested(p)):
            src, dst = of_mesh(tp=t, pp=p, dp=d), of_mesh(tp=t_g, pp=p_g)
            vanilla = plan_reshard(UNIFORM, src, dst, grouping="vanilla")
            assert set(vanilla.received) == {(t * p - 1) * whole // (t * p)}
            assert set(vanilla.peak) == {whole}
            assert max(vanilla.redundant) <= whole // (t * p)  # the table gives the bound
        ranks = t * p * d
        if 840 % ranks == 0 and ranks % t == 0:  # DeepSpeed-Chat trains with all ranks as shards
            gather = plan_reshard(UNIFORM, of_mesh(fsdp=ranks), of_mesh(tp=t), grouping="gather")
            assert set(gather.received) == {(ranks - 1) * whole // ranks}
            assert set(gather.peak) == {whole}
            assert set(gather.redundant) == {whole // ranks}


@pytest.mark.parametrize("name", ["llama-7b", "llama-70b", "qwen3-30b-a3b"])
def test_real_models_are_within_half_a_percent_of_the_formulas(name):
    """On average over the devices: the stages that have the embedding or the head are larger than the others.

    With more ranks than heads of keys and values, ranks hold copies, which the formulas leave out.
    """
    model = shape_named(name)
    for t, p, d in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2)):
        for t_g, p_g in product(nested(t), nested(p)):
            near = 0.005 if t <= model.kv_heads else 0.0065
            move = plan_reshard(model, of_mesh(tp=t, pp=p, dp=d), of_mesh(tp=t_g, pp=p_g))
            whole, count = move.model_bytes, len(move.devices)
            assert move.total / count == pytest.approx((t * p - t_g * p_g) * whole / (t_g * p_g * t * p), rel=near)
            assert sum(move.peak) / count == pytest.approx(whole / (t_g * p_g), rel=near)
            assert set(move.redundant) == {0}
            if p == 1:  # then every device is as large as the next
                assert max(move.received) == min(move.received)


@pytest.mark.parametrize(
    ("name", "src", "dst", "most"),
    [
        ("uniform", "tp=4,dp=4", "tp=8", 0),
        ("uniform", "tp=2,dp=8", "tp=4", 0),
        ("uniform", "fsdp=8", "tp=2", 0.375),
        ("uniform", "fsdp=16", "tp=4", 0.1875),
        ("llama-7b", "tp=4,dp=4", "tp=8", 0),
        ("llama-7b", "tp=2,dp=8", "tp=4", 0),
        ("llama-7b", "fsdp=8", "tp=2", 0.395),
        ("llama-7b", "fsdp=16", "tp=4", 0.205),
        ("llama-70b", "tp=8,pp=4,dp=4", "tp=8", 0.0942),
    ],
)
def test_bytes_stay_below_what_is_known_to_be_enough(name, src, dst, most):
    model = ModelShape.uniform(4, 16) if name == "uniform" else shape_named(name)
    move = plan_reshard(model, Mesh.of(src), Mesh.of(dst))
    assert max(move.received) <= most * move.model_bytes


# ---- against sets of numbers, counted one by one ------------------------------------------------------------------

meshes = st.sampled_from(
    [
        "1",
        "tp=2",
        "tp=4",
        "pp=2",
        "fsdp=2",
        "fsdp=3",
        "fsdp=4",
        "tp=2,fsdp=2",
        "pp=2,tp=2",
        "pp=3",
        "ep=2",
        "ep=4",
        "dp=2,tp=2",
        "ep=2,fsdp=2",
        "cp=2,tp=2",
    ]
).map(lambda text: Mesh() if text == "1" else Mesh.of(text))
models = st.sampled_from([DENSE, EXPERTS, ModelShape.uniform(3, 8, 2)])


@st.composite
def moves(draw, **options):
    """A move between layouts on the same, other or partly other devices."""
    model, src, dst = draw(models), draw(meshes), draw(meshes)
    first = draw(st.integers(0, src.size))
    devices = tuple(range(first, first + draw(st.sampled_from([1, 2])) * dst.size))
    fused = {"src_fused": draw(st.booleans()), "dst_fused": draw(st.booleans())}
    if not draw(st.booleans()) and src.size % dst.size == 0:
        devices = tuple(draw(st.permutations(range(src.size))))
    nodes = Cluster((Nodes("h100-80", 8, draw(st.sampled_from([2, 3, 4]))),))
    grouping = draw(st.sampled_from(["overlap", "vanilla", "gather"]))
    return plan_reshard(model, src, dst, None, devices, cluster=nodes, grouping=grouping, **fused, **options)


@settings(max_examples=60, deadline=None)
@given(moves())
def test_counts_are_those_of_the_sets(move):
    old, new = sets(move)
    size = move.src.model.dtype_bytes
    for device, received, peak, redundant in zip(move.devices, move.received, move.peak, move.redundant, strict=True):
        had, has = old.get(device, set()), new[device]
        whole = move.model_bytes // size
        assert received <= (whole - len(had)) * size  # never above the full gather
        if move.grouping == "overlap":
            assert (received, peak, redundant) == (len(has - had) * size, len(has | had) * size, len(had - has) * size)
        elif move.grouping == "vanilla":
            assert (received, peak, redundant) == ((whole - len(had)) * size, whole * size, len(had - has) * size)
        else:
            assert (received, peak, redundant) == ((whole - len(had)) * size, whole * size, len(had) * size)


@settings(max_examples=60, deadline=None)
@given(moves())
def test_transfers_carried_out_give_every_device_its_part(move):
    """With real values: what is sent was at the sender, arrives once, and was not there before."""
    value = {e: number for number, e in enumerate(sorted(elements(Layout(move.src.model, Mesh()), 0)))}
    old, new = sets(move)
    memory = {d: {e: value[e] for e in had} for d, had in old.items()}
    arrived = {d: {} for d in move.devices}
    inside = 0
    for t in sorted(move.transfers(), key=lambda t: t.relayed):  # what has come to a node is passed on last
        for at in product(*(range(a, b) for a, b in t.box)):
            element = t.name, at
            assert element not in arrived[t.target] and element not in memory.get(t.target, {})
            arrived[t.target][element] = (arrived if t.relayed else memory)[t.source][element]
            inside += move.cluster.node(t.source) == move.cluster.node(t.target)
    size = move.src.model.dtype_bytes
    for device, received in zip(move.devices, move.received, strict=True):
        has = {**memory.get(device, {}), **arrived[device]}
        assert len(arrived[device]) * size == received
        assert {e: has[e] for e in new[device]} == {e: value[e] for e in new[device]}
    assert move.links == {"same_node": inside * size, "between_nodes": move.total - inside * size}


SMALL_MOVES = [
    ("tp=4", "tp=2"), ("fsdp=4", "tp=2"), ("fsdp=4", "tp=4"), ("fsdp=6", "pp=2"), ("fsdp=6", "tp=2"), ("fsdp=5", "pp=2,tp=2"),
    ("tp=2,dp=2", "tp=4"), ("tp=2,dp=3", "pp=2"), ("pp=2,tp=2", "tp=4"), ("pp=3", "tp=4"), ("pp=3,fsdp=2", "fsdp=3"), ("fsdp=3", "fsdp=6"),
]  # fmt: skip


@pytest.mark.parametrize(("src", "dst"), SMALL_MOVES)
@pytest.mark.parametrize("model", [DENSE, EXPERTS, ModelShape.uniform(3, 12)], ids=lambda m: m.name)
def test_no_choice_of_hosts_receives_fewer_bytes(model, src, dst):
    src, dst = Mesh.of(src), Mesh.of(dst)
    if model.name == "experts" and "fsdp" in src.axes:
        src = Mesh({**src.axes, "ep": 2 if src.size <= 3 else 1})
    devices = range(dst.size * max(1, src.size // dst.size))
    assert len(devices) <= 6
    move = plan_reshard(model, src, dst, None, devices)
    assert move.total == fewest(move, permutations(range(len(devices))))


def fewest(move, orders):
    """The fewest bytes over orders of the places."""
    old = {d: elements(move.src, rank) for rank, d in enumerate(move.src_devices)}
    new = [elements(move.dst, rank) for rank in range(move.dst.mesh.size)]
    lacks = {d: [len(has - old.get(d, set())) for has in new] for d in move.devices}
    count = len(new)
    return move.src.model.dtype_bytes * min(
        sum(lacks[d][place % count] for d, place in zip(move.devices, order, strict=True)) for order in orders
    )


# ---- groups inside nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "node"),
    [
        ("fsdp=4", "tp=2", 2),
        ("fsdp=6", "pp=2", 2),
        ("fsdp=6", "tp=2", 2),
        ("tp=2,dp=3", "tp=2", 2),
        ("fsdp=6", "pp=3", 3),
        ("pp=2,fsdp=2", "pp=2,tp=2", 2),
        ("fsdp=4", "pp=2,tp=2", 2),
    ],
)
def test_groups_stay_in_a_node_and_no_such_choice_receives_fewer(src, dst, node):
    src, dst = Mesh.of(src), Mesh.of(dst)
    cluster = Cluster((Nodes("h100-80", src.size // node, node),))
    move = plan_reshard(DENSE, src, dst, cluster=cluster, inside_node=True)
    devices = move.devices
    group = min(node, dst.size)

    def stays(order):
        blocks = {}
        for device, place in zip(devices, order, strict=True):
            blocks.setdefault(cluster.node(device), []).append(place % dst.size // group)
        parts = Counter()
        for device, place in zip(devices, order, strict=True):
            parts[cluster.node(device), place % dst.size] += 1
        alike = all(len(set(b)) == 1 for b in blocks.values())
        return alike and len(parts) == cluster.nodes * group and len(set(parts.values())) == 1

    places = [r + copy * dst.size for r, copy in zip(move.ranks, move.replicas, strict=True)]
    assert sorted(places) == list(range(len(devices))) and stays(places)
    assert move.total == fewest(move, filter(stays, permutations(range(len(devices)))))
    if dst.size <= node:
        for copy in set(move.replicas):
            assert len({cluster.node(d) for d, r in zip(devices, move.replicas, strict=True) if r == copy}) == 1


def test_groups_that_do_not_fit_a_node_are_named():
    cluster = Cluster((Nodes("h100-80", 3, 4),))
    with pytest.raises(PlanError, match="groups of 6 ranks, which do not fit into nodes with 4 devices"):
        plan_reshard(DENSE, Mesh.of("fsdp=12"), Mesh.of("fsdp=6"), cluster=cluster, inside_node=True)
    with pytest.raises(PlanError, match="no cluster says where nodes end"):
        plan_reshard(DENSE, Mesh.of("fsdp=4"), Mesh.of("tp=2"), inside_node=True)


def test_a_slice_comes_from_the_same_node_where_it_is_there_and_senders_share_the_load():
    cluster = Cluster((Nodes("h100-80", 2, 4),))
    model = ModelShape.uniform(2, 8)
    move = plan_reshard(model, Mesh.of("dp=2,tp=4"), Mesh(), cluster=cluster)
    assert all(cluster.node(t.source) == cluster.node(t.target) for t in move.transfers())
    away = plan_reshard(model, Mesh.of("dp=2,tp=4"), Mesh(), None, range(8, 12))
    sent = Counter(t.source for t in away.transfers())
    assert set(sent) == set(range(8)) and len(set(sent.values())) == 1


# ---- what is asked wrongly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grouping": "overlaps"}, "no grouping 'overlaps'.*\n.*\n.*Did you mean 'overlap'"),
        ({"src_devices": [0, 1, 2]}, "the source fsdp=4 takes 4 devices; there are 3"),
        ({"src_devices": [0, 1, 2, 2]}, "device 2 is there twice"),
        ({"dst_devices": [4, 5, 6]}, "copies of it do not fill 3"),
        ({"grouping": "hybridflow"}, "HybridFlow's grouping is from pp,dp,tp"),
        ({"cluster": Cluster((Nodes("h100-80", 1, 2),))}, "device 3 of the source is not in the cluster h100-80:1x2"),
    ],
)
def test_what_is_wrong_is_named(options, said):
    with pytest.raises(PlanError, match=said):
        plan_reshard(DENSE, Mesh.of("fsdp=4"), Mesh.of("tp=2"), **options)


def test_json_has_a_number_for_each_device():
    found = plan_reshard(
        shape_named("llama-7b"), Mesh.of("fsdp=8"), Mesh.of("tp=2"), dst_devices=range(8, 12)
    ).to_json()
    assert found["model_bytes"] == 2 * 6_738_415_616
    assert found["devices"] == [8, 9, 10, 11]
    assert found["bytes_received"] == found["peak_bytes"]
    assert len(found["bytes_received"]) == len(found["redundant_bytes"]) == 4
    assert set(found["redundant_bytes"]) == {0}


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("tp=8,pp=4,dp=4", "tp=8"),
        ("fsdp=64", "tp=8"),
        ("fsdp=1024", "tp=8"),
        ("fsdp=128,tp=8", "tp=8,pp=8"),
        ("fsdp=1024", "fsdp=512,tp=2"),
    ],
)
def test_large_meshes_take_a_moment(src, dst):
    start = time.perf_counter()
    move = plan_reshard(shape_named("llama-70b"), Mesh.of(src), Mesh.of(dst))
    assert max(move.received) < move.model_bytes
    assert time.perf_counter() - start < 5  # alone it takes 0.5 s at most
