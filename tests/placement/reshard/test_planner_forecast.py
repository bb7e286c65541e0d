"""What is forecast of a move of weights is what a run moves: the same bytes, in the same boxes, from the same devices."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shapes

from flowrl.lowering.deployment import WorkerSpec
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.communication import Passing, planned_bytes
from flowrl.placement.cost.work import Role
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.model.weight_layout import Layout
from flowrl.placement.reshard.planner import plan_reshard
from flowrl.runtime.distributed.protocol import Blueprint
from flowrl.runtime.distributed.rank_client import RankClient
from flowrl.runtime.distributed.rank_parts import RankParts
from flowrl.runtime.distributed.worker_group import WorkerGroup
from flowrl.runtime.transfer.plan_moves import Held, plan_moves
from flowrl.workers.model_worker import ModelWorker

DENSE, EXPERTS = shapes(6)
LARGER = ModelShape("larger", 4, 64, 128, 4, 2, 16, 256)
DTYPE = {2: "bfloat16", 4: "float32"}


@st.composite
def meshes(draw, use, model):
    """A mesh that a backend which does this can be on, its axes and copies of it; how that backend lays weights out."""
    row = draw(st.sampled_from([row for row in BACKENDS.values() if row.does(use)]))
    axes = {"dp": draw(st.sampled_from([1, 1, 2, 3]))}
    for axis, sizes in {"pp": [1, 2, 3], "fsdp": [1, 2, 3, 4], "ep": [1, 2], "tp": [1, 2]}.items():
        if axis in row.axes and (axis != "ep" or model.experts):
            axes[axis] = draw(st.sampled_from(sizes))
    return Mesh(axes), row.layout


@st.composite
def moves(draw):
    """A forecast of a move between meshes of two backends, on the same, other or partly other devices."""
    model = draw(st.sampled_from([DENSE, EXPERTS, ModelShape.uniform(3, 8, 2)]))
    (src, _), (dst, rules) = draw(meshes("train", model)), draw(meshes("generate", model))
    room = max(src.size, dst.size) * 2
    sources = draw(st.permutations(range(room)))[: src.size]
    copies = draw(st.integers(1, room // dst.size))
    targets = draw(st.permutations(range(room)))[: dst.size * copies]
    nodes = Cluster((Nodes("h100-80", room, draw(st.sampled_from([1, 2, 3]))),))
    fused = {"src_fused": draw(st.booleans()), "dst_fused": draw(st.booleans())}
    return plan_reshard(
        model, src, dst, sources, targets, cluster=draw(st.sampled_from([None, nodes])), rules=rules, **fused
    )


def told(layout, rank):
    """What the process of a rank says that it holds or is to have, one weight at a time."""
    size, found = layout.model.dtype_bytes, {}
    for weight, box in layout.holds(rank):
        found[weight.name] = Held(DTYPE[size], size, weight.shape, (*found.get(weight.name, _NONE).boxes, box))
    return found


_NONE = Held("", 0, (), ())


def run_of(move):
    """The moves of a run whose processes are the devices, and hold and host what the forecast says."""
    held = {d: told(move.src, rank) for rank, d in enumerate(move.src_devices)}
    wanted = {d: told(move.dst, rank) for d, rank in zip(move.devices, move.ranks, strict=True)}
    return plan_moves(held, wanted, node=move.cluster.node if move.cluster else None)


@settings(max_examples=60, deadline=None)
@given(moves())
def test_a_run_moves_what_was_forecast(move):
    run = run_of(move)
    assert run.received == {d: n for d, n in sorted(zip(move.devices, move.received, strict=True)) if n}
    assert run.moves == tuple(move.plan.moves()), "boxes, hosts and senders, in the same order"
    if move.cluster is not None:
        node, size = move.cluster.node, move.src.model.dtype_bytes
        inside = sum(m.numbers * size for m in run.moves if not m.local and node(m.source) == node(m.target))
        assert move.links == {"same_node": inside, "between_nodes": run.total - inside}


@settings(max_examples=40, deadline=None)
@given(moves())
def test_ranks_take_boxes_from_where_it_was_forecast(move):
    """Of several ranks that hold a box, one on the same machine: the driver knows where its ranks are."""
    ranks = sorted({*move.src_devices, *move.devices})
    machine = move.cluster.node if move.cluster is not None else lambda device: 0
    link: Any = SimpleNamespace(where={rank: {"node": f"10.0.0.{machine(rank)}"} for rank in ranks})
    client = RankClient(link, {})
    blueprint = Blueprint("actor", ModelWorker, (), {}, {})
    theirs, its = (RankParts(ranks, (0,) * len(ranks)) for ranks in (move.src_devices, move.devices))
    source = WorkerGroup(client, blueprint, WorkerSpec("actor"), theirs)
    target = WorkerGroup(client, blueprint, WorkerSpec("actor", True), its)
    source.held = {d: told(move.src, rank) for rank, d in enumerate(move.src_devices)}
    target.held = {d: told(move.dst, rank) for d, rank in zip(move.devices, move.ranks, strict=True)}
    found = target.plan_from(source, {rank: number for number, rank in enumerate(ranks)})
    made = [(m.name, ranks[m.source], ranks[m.target], m.box) for m in found.moves]
    assert made == [(m.name, m.source, m.target, m.box) for m in move.plan.moves()]


@settings(max_examples=40, deadline=None)
@given(moves())
def test_costs_and_transfers_are_of_that_plan(move):
    got, passing = Counter[int](), Counter[tuple[int, str, bool]]()
    node = move.cluster.node if move.cluster is not None else lambda device: 0
    for part in move.transfers():
        size = part.numbers * move.src.model.dtype_bytes
        got[part.target] += size
        away = node(part.source) != node(part.target)
        passing[part.source, "out", away] += size
        passing[part.target, "in", away] += size
    assert tuple(got[d] for d in move.devices) == move.received
    inside, between = (max((n for (*_, to), n in passing.items() if to == away), default=0) for away in (False, True))
    assert move.busiest == (inside, between)
    if not (move.src.fused or move.dst.fused):
        asked = Role("actor", move.src.model), move.src.mesh, move.src_devices, move.dst.mesh, move.devices
        how = {"cluster": move.cluster, "rules": move.dst.rules, "grouping": "row"}
        row = plan_reshard(move.src.model, move.src.mesh, move.dst.mesh, move.src_devices, move.devices, **how)
        both = row.busiest_sender, row.busiest_receiver
        expected = Passing(row.at_once, row.busiest[1], row.relayed, *both)
        assert planned_bytes(*asked, move.dst.rules, move.cluster) == expected
        assert row.ranks == tuple(place % move.dst.mesh.size for place in range(len(move.devices)))


@settings(max_examples=40, deadline=None)
@given(moves())
def test_what_devices_of_the_source_send_is_what_transfers_take_from_them(move):
    sent = Counter[int]()
    for part in move.transfers():
        sent[part.source] += part.numbers * move.src.model.dtype_bytes
    assert move.sent == tuple(sent[device] for device in move.src_devices)


@pytest.mark.parametrize(("source", "copies"), [("fsdp=4", 8), ("tp=4", 8), ("dp=2,tp=2", 8), ("fsdp=4", 1)])
def test_few_ranks_that_train_send_the_weights_of_many_replicas(source, copies):
    move = plan_reshard(LARGER, Mesh.of(source), Mesh({"dp": copies}), range(4), range(4, 4 + copies))
    sent = Counter[int]()
    for part in move.transfers():
        sent[part.source] += part.numbers * LARGER.dtype_bytes
    average = move.model_bytes * copies / 4
    assert sum(move.sent) == 4 * average
    assert max(sent.values()) == max(move.sent) <= 1.1 * average, "as even as the holders allow"
    asked = Role("actor", LARGER), Mesh.of(source), (0, 1, 2, 3), Mesh({"dp": copies}), tuple(range(4, 4 + copies))
    assert planned_bytes(*asked).inside == max(move.model_bytes, *move.sent)


def test_a_host_is_chosen_and_the_run_is_held_to_it():
    """Two ranks in a row would receive more: the forecast is that of the order that it names."""
    move = plan_reshard(DENSE, Mesh.of("tp=2,dp=2"), Mesh.of("dp=2,tp=2"), (0, 1, 2, 3), (1, 0, 3, 2))
    assert move.ranks != (0, 1, 0, 1) and run_of(move).total == move.total == 0
    row = {d: told(move.dst, place % 2) for place, d in enumerate(move.devices)}
    held = {d: told(Layout(DENSE, move.src.mesh), rank) for rank, d in enumerate(move.src_devices)}
    assert plan_moves(held, row).total > 0
