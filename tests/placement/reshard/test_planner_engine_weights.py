"""Weights planned into the parameters of an engine's ranks: carried out on arrays, and counted in closed form."""

from __future__ import annotations

import runpy
from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from fusing import MODELS, checkpoint, fuse
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.communication import planned_bytes
from flowrl.placement.cost.work import Role
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.model.rank_parameters import parameters_of
from flowrl.placement.model.weight_layout import Layout
from flowrl.placement.reshard.planner import plan_reshard
from flowrl.placement.reshard.senders import plan_boxes

RULES = backend("vllm").layout
PAGE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "make_reshard_table.py"))


def slices(box, origin=None):
    return tuple(slice(a - o, b - o) for (a, b), o in zip(box, origin or (0,) * len(box), strict=True))


def carry_out(moves, held, parameters):
    """Take every move from what its source has, into the part of a parameter where it belongs.

    ``held``: by process and weight boxes with their arrays. ``parameters``: by process. Returns arrays by process and
    name, and the numbers that each process got from others. No number is written twice, and none is left out.
    """
    arrays = {p: {one.name: np.zeros(one.shape) for one in own} for p, own in parameters.items()}
    times = {p: {one.name: np.zeros(one.shape) for one in own} for p, own in parameters.items()}
    got = Counter()
    for move in moves:
        box, array = next((b, a) for b, a in held[move.source][move.name] if inside(move.box, b))
        numbers = array[slices(move.box, [a for a, _ in box])]
        for name, part in ((one.name, part) for one in parameters[move.target] for part in one.parts):
            if part.name == move.name and inside(move.box, part.box):
                shift = [at[0] - b[0] for at, b in zip(part.at, part.box, strict=True)]
                where = slices([(a + s, b + s) for (a, b), s in zip(move.box, shift, strict=True)])
                arrays[move.target][name][where] = numbers
                times[move.target][name][where] += 1
        if not move.local:
            got[move.target] += move.numbers
    for process, own in parameters.items():
        for one in own:
            assert times[process][one.name].sum() == sum(np.prod([b - a for a, b in part.box]) for part in one.parts)
            assert times[process][one.name].max(initial=0) <= 1
    return arrays, got


def inside(box, other):
    return all(c <= a and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


def same(found, wanted):
    found = {name.replace(".routed_experts.", "."): array for name, array in found.items()}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape and (found[name] == array).all(), name


@st.composite
def publishes(draw):
    """A trainer's layout on any of its axes, and an engine with tp and copies: on other devices, or partly the same."""
    name = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[name]
    sizes = {"pp": (1, 2, 3), "dp": (1, 2), "fsdp": (1, 2, 3, 7), "tp": (1, 2, 4)}
    sizes |= {"ep": (1, 2, 4)} if model.experts else {}
    src = Mesh({axis: draw(st.sampled_from(counts)) for axis, counts in sizes.items()})
    tp, copies = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]))
    first = draw(st.sampled_from([0, 1, src.size]))
    engine = draw(st.sampled_from(["vllm", "sglang"]))
    return plan_reshard(
        model,
        src,
        Mesh({"tp": tp}),
        dst_devices=range(first, first + tp * copies),
        src_fused=draw(st.booleans()),
        rules=backend(engine).layout,
    )


@settings(max_examples=60, deadline=None)
@given(publishes())
def test_every_rank_gets_its_parameters_from_any_trainer(move):
    model, tp = move.src.model, move.dst.mesh["tp"]
    whole, held = checkpoint(model), {}
    for rank, device in enumerate(move.src_devices):
        for weight, box in move.src.holds(rank):
            held.setdefault(device, {}).setdefault(weight.name, []).append((box, whole[weight.name][slices(box)]))
    ranks = dict(zip(move.devices, move.ranks, strict=True))
    parameters = {device: list(parameters_of(move.dst, rank)) for device, rank in ranks.items()}
    arrays, got = carry_out(move.plan.moves(), held, parameters)
    for device, rank in ranks.items():
        same(arrays[device], fuse(whole, model, tp=tp, rank=rank))
    assert [got[device] * model.dtype_bytes for device in move.devices] == list(move.received)


def interleaved(model, tp):
    """The boxes of a trainer that has queries, keys and values of each group of heads in turn, its rows cut by tp."""
    groups, dim = model.kv_heads, model.head_dim
    lengths = (("q_proj", model.heads // groups * dim), ("k_proj", dim), ("v_proj", dim))
    rows = [(name, g * n + row) for g in range(groups) for name, n in lengths for row in range(n)]
    layout, each = Layout(model, Mesh({"tp": tp})), len(rows) // tp
    for rank in range(tp):
        boxes = {weight.name: [box] for weight, box in layout.holds(rank) if weight.fused[:3] != "qkv"}
        mine = rows[rank * each : (rank + 1) * each]
        runs = [list(run) for _, run in groupby(enumerate(mine), key=lambda at: (at[1][0], at[1][1] - at[0]))]
        for weight in (w for w in model.weights() if w.fused[:3] == "qkv"):
            for run in runs:
                name, first, last = run[0][1][0], run[0][1][1], run[-1][1][1] + 1
                if f".{name}." in weight.name:
                    box = ((first, last), *((0, n) for n in weight.shape[1:]))
                    boxes.setdefault(weight.name, []).append(box)
        yield rank, boxes


@pytest.mark.parametrize("name", ["llama", "qwen2, tied", "qwen3, tied", "qwen2, heads for all"])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 8), (4, 2), (4, 8), (8, 4)])
def test_queries_keys_and_values_that_lie_in_groups_arrive(name, before, after):
    """Also where a rank of the trainer ends inside of a head."""
    model = MODELS[name]
    whole, boxes = checkpoint(model), dict(interleaved(model, before))
    held = {r: {n: [(b, whole[n][slices(b)]) for b in own] for n, own in h.items()} for r, h in boxes.items()}
    layout = Layout(model, Mesh({"tp": after}), rules=RULES)
    parameters = {100 + rank: list(parameters_of(layout, rank)) for rank in range(after)}
    wanted = {}
    for process, own in parameters.items():
        for part in (part for one in own for part in one.parts):
            wanted.setdefault(process, {}).setdefault(part.name, []).append(part.box)
    plan = plan_boxes(boxes, wanted)
    arrays, got = carry_out(plan.moves(), held, parameters)
    for rank in range(after):
        same(arrays[100 + rank], fuse(whole, model, tp=after, rank=rank))
    assert dict(got) == dict(plan.received), "nothing is there before, and every number comes once"


def numbers_of_a_rank(model, tp):
    """What a rank of an engine has, from sizes alone; of the vocabulary the largest part."""
    hidden, head, layers = model.hidden, model.head_dim, model.layers
    kv = max(1, model.kv_heads // tp)
    rows = -(-model.vocab // 64) * 64 // tp
    layer = (model.heads // tp + 2 * kv) * head * hidden + hidden * model.heads // tp * head  # qkv, o
    layer += 3 * model.intermediate // tp * hidden + 2 * hidden + 2 * head * model.qk_norm
    return layers * layer + hidden + rows * hidden * (1 if model.tied else 2)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-32b", "qwen3-0.6b", "llama-70b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_bytes_are_those_of_the_sizes(name, tp):
    """No rank gets more than its part, wherever it comes from; also where ranks share a head, at tp=16."""
    model = shape_named(name)
    for src in ("fsdp=16", "tp=4,pp=2,dp=2"):
        source, to = Mesh.of(src), range(16, 32)
        move = plan_reshard(model, source, Mesh({"tp": tp}), dst_devices=to, rules=RULES)
        assert max(move.received) == numbers_of_a_rank(model, tp) * 2
        cost = planned_bytes(Role("a", model), source, tuple(range(16)), Mesh({"tp": tp}), tuple(to), move.dst.rules)
        assert max(move.received) <= cost.inside <= 1.2 * max(max(move.received), move.total / 16)


@pytest.mark.parametrize(("tp", "most"), [(4, 0.38), (8, 0.21)])
def test_a_rank_of_qwen3_8b_gets_a_part_of_what_whole_weights_would_take(tp, most):
    model = shape_named("qwen3-8b")
    fused = 36 * ((32 + 2 * 8) * 128 * 4096 + 2 * 12288 * 4096)  # q, k, v, gate and up, whole
    split = 36 * (32 * 128 * 4096 + 12288 * 4096)  # o and down
    vocabulary, norms = 2 * 151936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    by_shape, by_loader = fused + (split + vocabulary) / tp + norms, fused + vocabulary + split / tp + norms
    ours = numbers_of_a_rank(model, tp)
    assert ours / by_shape <= most and ours / by_loader <= most - 0.03
    whole_weights = PAGE["whole_weights"]
    assert whole_weights(model, tp) == by_loader * 2 and whole_weights(model, tp, vocabulary=False) == by_shape * 2
    move = plan_reshard(model, Mesh.of("fsdp=8"), Mesh({"tp": tp}), dst_devices=range(8, 16), rules=RULES)
    assert max(move.received) == ours * 2
