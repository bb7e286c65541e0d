"""The parameters of an engine's ranks, against plain code that splits and fuses arrays."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fusing import MODELS, SIZES, checkpoint, fuse

from flowrl.errors import PlanError
from flowrl.placement.backends import BACKENDS, backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.model.rank_parameters import parameters_of
from flowrl.placement.model.weight_layout import PLAIN, Layout, check_layout, layers_of_stage

ENGINES = ("vllm", "sglang")


def slices(box):
    return tuple(slice(a, b) for a, b in box)


def laid(layout, rank, whole):
    """The parameters of a rank as arrays, each part taken from the whole weights; every number is written once."""
    found = {}
    for parameter in parameters_of(layout, rank):
        array, times = np.zeros(parameter.shape), np.zeros(parameter.shape)
        for part in parameter.parts:
            assert whole[part.name].shape == part.shape
            array[slices(part.at)] = whole[part.name][slices(part.box)]
            times[slices(part.at)] += 1
        assert ((times == 1) == (array != 0)).all() and times.max(initial=0) <= 1
        assert parameter.name not in found
        found[parameter.name.replace(".routed_experts.", ".")] = array
    return found


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape and (found[name] == array).all(), name


@pytest.mark.parametrize(("name", "tp", "engine"), [*product(MODELS, (1, 2, 4, 8), ENGINES)])
def test_ranks_have_what_fusing_by_hand_gives(name, tp, engine):
    model, whole = MODELS[name], checkpoint(MODELS[name])
    layout = Layout(model, Mesh({"tp": tp}), rules=backend(engine).layout)
    for rank in range(tp):
        same(laid(layout, rank, whole), fuse(whole, model, tp=tp, rank=rank))


@pytest.mark.parametrize(("ep", "tp", "experts"), [(2, 1, 8), (2, 2, 8), (4, 2, 8), (2, 2, 6), (3, 2, 9)])
def test_ranks_of_ep_and_tp_together_have_whole_experts(ep, tp, experts):
    model = replace(MODELS["experts"], experts=experts)
    whole, mesh = checkpoint(model), Mesh({"ep": ep, "tp": tp})
    layout = Layout(model, mesh, rules=backend("vllm").layout)
    for rank in range(mesh.size):
        number = mesh.coordinates(rank).get("tp", 0)
        same(laid(layout, rank, whole), fuse(whole, model, tp=tp, rank=number, experts=(ep * tp, rank)))


def test_or_tp_splits_those_that_ep_leaves():
    model, mesh = MODELS["experts"], Mesh.of("ep=2,tp=2")
    layout = Layout(model, mesh, rules=backend("sglang").layout)
    last = {p.name: p for p in parameters_of(layout, mesh.rank({"ep": 1, "tp": 1}))}
    gate, up = last["model.layers.2.mlp.experts.w13_weight"].parts
    assert last["model.layers.2.mlp.experts.w13_weight"].shape == (4, 8, 6)
    assert gate.box == up.box == ((4, 8), (4, 8), (0, 6))
    assert (gate.at, up.at) == (((0, 4), (0, 4), (0, 6)), ((0, 4), (4, 8), (0, 6)))


@pytest.mark.parametrize(
    ("engine", "stages"),
    [
        ("fsdp2", [(0, 3), (3, 6), (6, 8), (8, 10)]),
        ("vllm", [(0, 2), (2, 5), (5, 8), (8, 10)]),
        ("sglang", [(0, 2), (2, 4), (4, 7), (7, 10)]),
    ],
)
def test_backends_differ_in_which_stages_are_longer(engine, stages):
    longer = backend(engine).layout.longer
    assert [layers_of_stage(10, 4, s, longer) for s in range(4)] == stages
    assert [layers_of_stage(7, 1, 0, longer), layers_of_stage(8, 2, 1, longer)] == [(0, 7), (4, 8)]


def test_stages_have_the_parameters_of_their_layers_and_their_ends():
    layout = Layout(MODELS["qwen3, tied"], Mesh.of("pp=2,tp=2"), rules=backend("vllm").layout)
    first, last = ({p.name for p in parameters_of(layout, rank)} for rank in (1, 3))
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}  # the last one has one less
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"2"}
    ends = {"model.embed_tokens.weight", "model.norm.weight"}
    assert first & ends == {"model.embed_tokens.weight"} and last & ends == ends  # the tied head is the embedding


def test_a_rank_may_have_nothing_but_added_rows():
    layout = Layout(MODELS["llama"], Mesh.of("tp=8"), rules=backend("vllm").layout)
    *_, head = parameters_of(layout, 7)
    assert (head.name, head.shape, head.parts) == ("lm_head.weight", (24, 6), ())  # 192 rows, of which 150 are tokens


def test_the_parts_of_a_rank_are_the_boxes_that_are_planned():
    for engine, name, mesh in product(ENGINES, ("a shared expert", "qwen2, tied"), ("pp=2,tp=4", "pp=3", "ep=2,tp=2")):
        layout = Layout(MODELS[name], Mesh.of(mesh), rules=backend(engine).layout)
        for rank in range(layout.mesh.size):
            parts = [(p.name, p.box) for parameter in parameters_of(layout, rank) for p in parameter.parts]
            assert sorted(parts) == sorted((weight.name, box) for weight, box in layout.holds(rank))


def test_a_vocabulary_that_is_rounded_up_has_to_divide():
    model = ModelShape.from_config({**SIZES, "model_type": "llama", "num_attention_heads": 6, "intermediate_size": 12})
    check_layout(model, Mesh.of("tp=6"))
    with pytest.raises(PlanError, match=r"rounded up to 256 rows, which tp=6 does not divide\.\n.*a power of 2"):
        check_layout(replace(model, vocab=193), Mesh.of("tp=6"), backend("vllm").layout)


def test_backends_that_train_have_the_weights_of_the_checkpoint():
    assert {row.name for row in BACKENDS.values() if row.layout != PLAIN} == set(ENGINES)
    layout = Layout(shape_named("qwen3-0.6b"), Mesh.of("tp=2"))
    assert [p.name for p in parameters_of(layout, 0)] == [w.name for w, _ in layout.holds(0)]
