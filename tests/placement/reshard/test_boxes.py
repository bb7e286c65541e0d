import random
import time
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shapes

from flowrl.errors import PlanError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.reshard import senders as planned
from flowrl.placement.reshard.boxes import shared, split, volume, without
from flowrl.placement.reshard.planner import plan_reshard
from flowrl.placement.reshard.senders import Move

DENSE, EXPERTS = shapes(6)


def plan_boxes(*both, **how):
    return tuple(planned.plan_boxes(*both, **how).moves())


def at(box):
    return tuple(slice(a, b) for a, b in box)


# ---- against arrays of numbers ------------------------------------------------------------------------------------


@st.composite
def boxes_in(draw, shape):
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((a, b) for a, b in pairs)  # some are empty


@st.composite
def holdings(draw):
    """Shapes by name, and what three sources and three targets have of them; 2 is both."""
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=2))
    shapes = {f"w{i}": shape for i, shape in enumerate(shapes)}

    def some(ranks):
        return {r: {n: draw(st.lists(boxes_in(s), max_size=3)) for n, s in shapes.items()} for r in ranks}

    return shapes, some((0, 1, 2)), some((2, 3, 4))


@settings(max_examples=300, deadline=None)
@given(holdings(), st.booleans())
def test_every_number_comes_once_from_a_holder(case, near):
    shapes, held, wanted = case
    have = {(r, n): np.zeros(s, bool) for r in held for n, s in shapes.items()}
    for (r, n), mask in have.items():
        for box in held[r][n]:
            mask[at(box)] = True
    missing = [
        (t, n, box)
        for t, weights in wanted.items()
        for n, boxes in weights.items()
        for box in boxes
        if not np.any([have[r, n] for r in held], axis=0)[at(box)].all()
    ]
    node = (lambda r: r % 2) if near else None
    if missing:
        with pytest.raises(PlanError, match="no process holds it"):
            plan_boxes(held, wanted, node=node)
        return
    moves = plan_boxes(held, wanted, node=node)
    for target, weights in wanted.items():
        for name, boxes in weights.items():
            asked, got = np.zeros(shapes[name], int), np.zeros(shapes[name], int)
            for box in boxes:
                asked[at(box)] = 1
            for move in moves:
                if (move.target, move.name) == (target, name):
                    assert move.numbers > 0
                    whose = wanted if move.relayed else held
                    assert any(shared(move.box, box) == move.box for box in whose[move.source][name])
                    assert not move.relayed or (near and move.source % 2 == target % 2)
                    own = have.get((target, name), np.zeros(shapes[name], bool))[at(move.box)]
                    assert own.all() if move.local else not own.any()
                    if near and not move.local:
                        beside = [r for r in held if r % 2 == target % 2 and have[r, name][at(move.box)].all()]
                        assert not beside or move.source in beside
                    got[at(move.box)] += 1
            assert (asked == got).all()


@settings(max_examples=100, deadline=None)
@given(holdings(), st.randoms(use_true_random=False))
def test_the_order_in_which_processes_spoke_changes_nothing(case, chance):
    _, held, wanted = case

    def mixed(by_rank):
        ranks = list(by_rank)
        chance.shuffle(ranks)
        return {r: dict(chance.sample(list(by_rank[r].items()), len(by_rank[r]))) for r in ranks}

    def plan(*both):
        try:
            return plan_boxes(*both)
        except PlanError as error:
            return str(error)

    assert plan(held, wanted) == plan(mixed(held), mixed(wanted))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pieces_of_a_box_are_the_box(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    box = data.draw(boxes_in(shape).filter(volume))
    count = np.zeros(shape, int)
    most = data.draw(st.integers(1, 40))
    for part in split(box, most):
        assert volume(part) <= most
        count[at(part)] += 1
    assert count.sum() == count[at(box)].sum() == volume(box)
    hole = data.draw(boxes_in(shape).map(lambda b: shared(b, box)).filter(bool))
    for part in without(box, hole):
        count[at(part)] -= 1
    assert (count == 1).sum() == count[at(hole)].sum() == volume(hole)


# ---- against the planner of layouts -------------------------------------------------------------------------------


def holding(layout, rank):
    found = {}
    for weight, box in layout.holds(rank):
        found.setdefault(weight.name, []).append(box)
    return found


def both_ways(model, src, dst, **how):
    """The same move as layouts and as boxes, with the hosts that the planner of layouts chose."""
    move = plan_reshard(model, Mesh.of(src), Mesh.of(dst), **how)
    held = {d: holding(move.src, rank) for rank, d in enumerate(move.src_devices)}
    wanted = {d: holding(move.dst, rank) for d, rank in zip(move.devices, move.ranks, strict=True)}
    return move, held, wanted


PAIRS = [
    ("tp=4", "tp=2"),  # nested
    ("tp=4,pp=2", "tp=2"),
    ("tp=2,pp=2,dp=2", "tp=2"),
    ("tp=2,dp=2", "tp=4"),  # grows
    ("dp=4", "tp=4"),
    ("fsdp=4", "tp=2"),
    ("fsdp=4", "tp=4"),
    ("fsdp=3,dp=2", "tp=2"),  # does not divide
    ("pp=3,tp=2", "fsdp=6"),
    ("fsdp=6", "pp=2"),
    ("tp=2,fsdp=2,dp=2", "fsdp=4,tp=2"),
]


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_bytes_are_those_of_the_planner_of_layouts(src, dst):
    for fused in (False, True):
        move, held, wanted = both_ways(DENSE, src, dst, src_fused=fused)
        got = Counter[int]()
        for part in plan_boxes(held, wanted):
            got[part.target] += 0 if part.local else part.numbers * DENSE.dtype_bytes
        assert tuple(got[d] for d in move.devices) == move.received


@pytest.mark.parametrize(("src", "dst"), [("ep=2,tp=2", "tp=4"), ("ep=4", "fsdp=4"), ("ep=2,fsdp=2", "ep=2,tp=2")])
def test_experts_are_counted_too(src, dst):
    move, held, wanted = both_ways(EXPERTS, src, dst)
    sent = sum(m.numbers for m in plan_boxes(held, wanted) if not m.local)
    assert sent * EXPERTS.dtype_bytes == move.total


def test_other_devices_get_everything():
    move, held, wanted = both_ways(DENSE, "fsdp=2", "tp=2", src_devices=(0, 1), dst_devices=(2, 3))
    moves = plan_boxes(held, wanted)
    assert {m.source for m in moves} == {0, 1} and {m.target for m in moves} == {2, 3}
    assert sum(m.numbers for m in moves) * DENSE.dtype_bytes == move.total


def test_nested_meshes_receive_what_hybridflow_does():
    model, whole = ModelShape.uniform(layers=12, columns=24), 12 * 24 * 2
    for (t, p), (t_g, p_g) in product([(4, 1), (2, 2), (4, 3)], [(1, 1), (2, 1)]):
        _, held, wanted = both_ways(model, f"tp={t},pp={p}", f"tp={t_g},pp={p_g}")
        moves = plan_boxes(held, wanted)
        for target in wanted:
            got = sum(2 * m.numbers for m in moves if m.target == target and not m.local)
            assert got == (t * p - t_g * p_g) * whole // (t_g * p_g * t * p)


def test_a_large_model_is_planned_in_no_time():
    """Measured: 0.1 s of one core."""
    _, held, wanted = both_ways(shape_named("llama-7b"), "fsdp=16", "tp=8")
    begun = time.process_time()
    plan_boxes(held, wanted)
    assert time.process_time() - begun < 2


# ---- by hand ------------------------------------------------------------------------------------------------------


def test_holders_take_turns():
    held = {r: {f"w{i}": [((0, 8),)] for i in range(6)} for r in (0, 1, 2)}
    moves = plan_boxes(held, {3: held[0]})
    assert Counter(m.source for m in moves) == {0: 2, 1: 2, 2: 2}


def test_a_large_one_is_made_up_for():
    held = {r: {"a": [((0, 30),)], **{f"b{i}": [((0, 10),)] for i in range(3)}} for r in (0, 1)}
    assert [m.source for m in plan_boxes(held, {2: held[0]})] == [0, 1, 1, 1]


def test_the_own_node_goes_first():
    held = {r: {"w": [((0, 8),)]} for r in (0, 1, 5)}
    assert plan_boxes(held, {4: {"w": [((2, 4),)]}}, node=lambda r: r // 4) == (Move("w", 5, 4, ((2, 4),)),)


def test_what_is_there_is_not_cut_where_others_end():
    held = {0: {"w": [((0, 8), (0, 8))]}, 1: {"w": [((0, 3), (0, 8))]}, 2: {"w": [((3, 8), (0, 5))]}}
    assert plan_boxes(held, {0: {"w": [((0, 8), (2, 6))]}}) == (Move("w", 0, 0, ((0, 8), (2, 6))),)


def test_a_weight_without_dims_is_one_number():
    assert plan_boxes({1: {"scale": [()]}}, {0: {"scale": [()]}}) == (Move("scale", 1, 0, ()),)


def test_who_asks_for_what_nobody_has_is_told_what_there_is():
    with pytest.raises(PlanError) as info:
        plan_boxes({0: {"w": [((0, 4), (0, 2))]}}, {3: {"w": [((2, 6), (0, 2))]}})
    assert "process 3 is to have w[4:6, 0:2], and no process holds it" in info.value.what
    assert info.value.have == "[0:4, 0:2]"
    with pytest.raises(PlanError, match="process 0 is to have v") as info:
        plan_boxes({0: {"w": [((0, 4),)]}}, {0: {"v": [((0, 1),)]}})
    assert info.value.have == "nothing of that name"


def test_random_cuts_of_many_processes():
    """Grids that do not fit each other: each of 7 processes has a random strip, each of 5 wants another."""
    chance = random.Random(3)

    def strips(count, dim):
        ends = sorted(chance.sample(range(1, 60), count - 1))
        for pair in zip([0, *ends], [*ends, 60], strict=True):
            yield [(pair, (0, 60)) if dim == 0 else ((0, 60), pair)]

    held = {r: {"w": boxes} for r, boxes in enumerate(strips(7, 0))}
    wanted = {r: {"w": boxes} for r, boxes in enumerate(strips(5, 1))}
    moves = plan_boxes(held, wanted)
    assert len(moves) == 35 and sum(m.numbers for m in moves) == 3600
