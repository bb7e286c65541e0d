"""Who sends what: counts are those of the moves, and both those of a plain count over all numbers of all boxes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shapes

from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.reshard.dealing import deal, share_out
from flowrl.placement.reshard.planner import plan_reshard

DENSE, EXPERTS = shapes(6)
SMALL = ModelShape.uniform(3, 8, 2)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_shares_are_those_of_pieces_that_are_dealt_one_by_one(before, size, count, chance):
    sources = chance.sample(range(10), len(before))
    sent = Counter(dict(zip(sources, before, strict=True)))
    plain = Counter(sent)
    order = []
    for _ in range(count):  # whoever has sent least, of equals the first
        order.append(min(sources, key=lambda source: (plain[source], source)))
        plain[order[-1]] += size
    shares = dict(share_out(sent, sources, size, count))
    assert deal(sent, sources, size, count) == order
    assert sent == plain
    assert shares == {source: number * size for source, number in Counter(order).items()}


@st.composite
def moves(draw):
    """A move between small meshes, on the same, other or partly other devices, on nodes of some size."""
    model = draw(st.sampled_from([DENSE, EXPERTS, SMALL]))
    axes = ("pp", "dp", "fsdp", "tp") if model is not EXPERTS else ("dp", "fsdp", "ep", "tp")
    src, dst = (Mesh({axis: draw(st.sampled_from([1, 1, 2])) for axis in axes}) for _ in range(2))
    room = 2 * max(src.size, dst.size)
    sources = draw(st.permutations(range(room)))[: src.size]
    targets = draw(st.permutations(range(room)))[: dst.size * draw(st.integers(1, room // dst.size))]
    cluster = Cluster((Nodes("h100-80", room, draw(st.sampled_from([1, 2, 3]))),))
    grouping = draw(st.sampled_from(["row", "overlap"]))
    return plan_reshard(model, src, dst, sources, targets, cluster=cluster, grouping=grouping)


def numbers(layout, rank):
    """Every number that a rank has, by weight and place: nothing is computed with boxes."""
    found = set()
    for weight, box in layout.holds(rank):
        places = [()]
        for low, high in box:
            places = [(*place, i) for place in places for i in range(low, high)]
        found |= {(weight.name, place) for place in places}
    return found


@settings(max_examples=60, deadline=None)
@given(moves())
def test_what_passes_a_device_is_what_a_count_of_all_numbers_finds(move):
    node, size = move.cluster.node, move.src.model.dtype_bytes
    held = {d: numbers(move.src, rank) for rank, d in enumerate(move.src_devices)}
    wanted = {d: numbers(move.dst, rank) for d, rank in zip(move.devices, move.ranks, strict=True)}
    got = {d: set() for d in wanted}
    sent, out, into = Counter(), Counter(), Counter()
    inside, between, crossed, passed_on = Counter(), Counter(), dict[int, set](), list[tuple[int, set]]()
    brought = {d: set() for d in wanted}
    for part in move.transfers():
        places = [()]
        for low, high in part.box:
            places = [(*place, i) for place in places for i in range(low, high)]
        here = {(part.name, place) for place in places}
        assert not here & held.get(part.target, set()) and not here & got[part.target]
        got[part.target] |= here
        sent[part.source] += len(here) * size
        near = node(part.source) == node(part.target)
        beside = [d for d in held if node(d) == node(part.target) and here <= held[d]]
        assert near or not beside, "a holder in the node of the target comes first"
        if part.relayed:
            passed_on.append((part.source, here))
            assert near and not beside, "what is in no holder of the node is passed on inside it"
        else:
            assert here <= held[part.source]
        if not near:
            brought[part.target] |= here
            assert not here & crossed.setdefault(node(part.target), set()), "every number comes to a node once"
            crossed[node(part.target)] |= here
        for device, way in ((part.source, "sent"), (part.target, "received")):
            (inside if near else between)[device, way] += len(here) * size
        if not near:
            out[node(part.source)] += len(here) * size
            into[node(part.target)] += len(here) * size
    for d, asked in wanted.items():
        assert got[d] == asked - held.get(d, set())
    for source, here in passed_on:
        assert here <= brought[source], "who passes on has got it from another node"
    gives, gets = Counter(), Counter()
    for part in move.transfers():
        if part.relayed:
            gives[part.source] += part.numbers * size
            gets[part.target] += part.numbers * size
    assert move.relayed == max([*gives.values(), *gets.values()], default=0)
    first = [n - (gives if way == "sent" else gets)[device] for (device, way), n in inside.items()]
    assert move.at_once == max(first, default=0)
    assert move.sent == tuple(sent[d] for d in move.src_devices)
    assert move.busiest == (max(inside.values(), default=0), max(between.values(), default=0))
    assert move.node_links == {n: (out[n], into[n]) for n in sorted({*out, *into})}


@pytest.mark.parametrize(("source", "copies"), [("fsdp=4", 8), ("tp=4", 8), ("dp=2,tp=2", 8), ("dp=4", 3)])
def test_no_holder_sends_much_more_than_it_has_to(source, copies):
    model = ModelShape("larger", 4, 64, 128, 4, 2, 16, 256)
    move = plan_reshard(model, Mesh.of(source), Mesh({"dp": copies}), range(4), range(4, 4 + copies), grouping="row")
    assert sum(move.sent) == move.total == model.bytes * copies
    assert max(move.sent) <= 1.1 * move.total / 4


@pytest.mark.parametrize(("mesh", "together"), [("dp=8", 8), ("dp=4,tp=2", 4), ("dp=2,tp=4", 2), ("tp=8", 1)])
def test_replicas_of_a_node_share_what_comes_to_it(mesh, together):
    """Each brings its part over the network, evenly, and gets the rest from the others: a scatter and an all-gather."""
    model = ModelShape("larger", 12, 64, 128, 8, 8, 8, 256)
    cluster = Cluster((Nodes("h100-80", 4, 8),))
    targets = range(8, 32)
    lie = Mesh.of(mesh)
    copies = Mesh({**lie.axes, "dp": 3 * lie["dp"]})
    move = plan_reshard(model, Mesh.of("fsdp=8"), copies, range(8), targets, cluster=cluster, grouping="row")
    part = move.received[0]
    assert move.busiest_receiver[1] == pytest.approx(part / together, rel=0.15)
    assert move.relayed == pytest.approx(part * (together - 1) / together, rel=0.15, abs=0.05 * part)
    into = {node: numbers for node, (_, numbers) in (move.node_links or {}).items() if node}
    assert set(into) == {1, 2, 3} and len(set(into.values())) == 1
    assert into[1] <= model.bytes * 1.2, "rows of the model once, but for norms and what tp repeats"


def test_forecasts_of_many_devices_count_turns_and_make_no_list():
    import time

    model = ModelShape("large", 64, 4096, 12288, 32, 8, 128, 151936)
    cluster = Cluster((Nodes("h100-80", 128, 8),))
    begun = time.process_time()
    lie = Mesh({"dp": 256, "tp": 2})
    move = plan_reshard(model, Mesh.of("fsdp=512"), lie, range(512), range(512, 1024), cluster=cluster, grouping="row")
    assert move.relayed > 0 and move.busiest[1] < move.received[0] / 3
    assert time.process_time() - begun < 4.0
