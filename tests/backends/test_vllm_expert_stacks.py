"""Experts under the names of transformers: each number of a weight lies where the plan of boxes has it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_tiny import CONFIGS

from flowrl.backends.vllm.expert_stacks import as_transformers_has_them
from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.model.rank_parameters import parameters_of
from flowrl.placement.model.weight_layout import Layout

BOTH = "model.layers.1.mlp.experts.gate_up_proj"


def parameters(kind, tp, rank):
    shape = ModelShape.from_config(CONFIGS[kind])
    return list(parameters_of(Layout(shape, Mesh({"tp": tp}), rules=backend("vllm").layout), rank))


def filled(parameters, whole):
    """Parameters of a rank with the numbers of whole weights, by name."""
    found = {}
    for one in parameters:
        found[one.name] = torch.zeros(one.shape)
        for part in one.parts:
            assert whole[part.name].shape == part.shape
            at, box = (tuple(slice(a, b) for a, b in ranges) for ranges in (part.at, part.box))
            found[one.name][at] = whole[part.name][box]
    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_filled_from_either_names_are_the_same(kind, tp):
    config = dict(CONFIGS[kind])
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    theirs = {name: weight.data for name, weight in net.named_parameters()}
    plan = {}
    for name, weight in theirs.items():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = weight.chunk(2, dim=1)
            above = name.removesuffix("gate_up_proj")
            plan |= {f"{above}gate_proj.weight": gate, f"{above}up_proj.weight": up}
        else:
            plan[name + ".weight" if name.endswith(".experts.down_proj") else name] = weight
    for rank in range(tp):
        planned = parameters(kind, tp, rank)
        here, there = filled(as_transformers_has_them(planned), theirs), filled(planned, plan)
        assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


def test_gate_and_up_are_one_box_where_a_rank_has_all_of_them_and_two_where_it_has_a_part():
    whole, split = (
        next(p for p in as_transformers_has_them(parameters("qwen3_moe", tp, tp - 1)) if p.parts[0].name == BOTH)
        for tp in (1, 2)
    )
    (part,) = whole.parts
    assert part.shape == (6, 64, 64) and part.box == part.at == ((0, 6), (0, 64), (0, 64))
    assert [(part.box[1], part.at[1]) for part in split.parts] == [((16, 32), (0, 16)), ((48, 64), (16, 32))]
