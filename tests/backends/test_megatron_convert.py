"""Where the rows of megatron-core's parameters lie in a checkpoint, for every mesh, without megatron-core."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.backends.megatron.convert import Converter, Part
from flowrl.backends.megatron.model import stages
from flowrl.backends.megatron.parallel import Parallel
from flowrl.backends.megatron.passes import feed
from flowrl.backends.megatron.plain import Plain
from flowrl.errors import PlanError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.weight_layout import layers_of_stage

HEADS, GROUPS, DIM, HIDDEN, INNER, EXPERTS, VOCAB, LAYERS = 8, 4, 2, 6, 8, 4, 11, 3


class Sizes:
    num_attention_heads, num_key_value_heads, head_dim, hidden_size = HEADS, GROUPS, DIM, HIDDEN


def layer(at, experts):
    """Shapes of a layer in a checkpoint."""
    attention = {
        "q_proj.weight": (HEADS * DIM, HIDDEN),
        "k_proj.weight": (GROUPS * DIM, HIDDEN),
        "v_proj.weight": (GROUPS * DIM, HIDDEN),
        "q_proj.bias": (HEADS * DIM,),
        "k_proj.bias": (GROUPS * DIM,),
        "v_proj.bias": (GROUPS * DIM,),
        "o_proj.weight": (HIDDEN, HEADS * DIM),
    }
    dense = {
        "gate_proj.weight": (INNER, HIDDEN),
        "up_proj.weight": (INNER, HIDDEN),
        "down_proj.weight": (HIDDEN, INNER),
    }
    sparse = {"experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "experts.down_proj": (EXPERTS, HIDDEN, INNER)}
    return {
        **{f"{at}self_attn.{n}": s for n, s in attention.items()},
        **{f"{at}mlp.{n}": s for n, s in (sparse if experts else dense).items()},
        f"{at}input_layernorm.weight": (HIDDEN,),
        f"{at}post_attention_layernorm.weight": (HIDDEN,),
    }


def plain(*, experts, tied):
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= layer(f"model.layers.{i}.", experts)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return Plain(Sizes, shapes, torch.ones(1), tied, None)


def parameters(mesh, at, *, experts, tied):
    """The names and shapes of a stage's parameters, as megatron-core has them."""
    tp, ep, stage = mesh["tp"], mesh["ep"], at.get("pp", 0)
    vocab = (-(-VOCAB // tp), HIDDEN)
    first, last = layers_of_stage(LAYERS, mesh["pp"], stage)
    found = {"embedding.word_embeddings.weight": vocab} if stage == 0 else {}
    for i in range(last - first):
        own = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * DIM // tp, HIDDEN),
            "self_attention.linear_qkv.bias": ((HEADS + 2 * GROUPS) * DIM // tp,),
            "self_attention.linear_proj.weight": (HIDDEN, HEADS * DIM // tp),
            "pre_mlp_layernorm.weight": (HIDDEN,),
        }
        at_mlp = [f"mlp.experts.local_experts.{j}." for j in range(EXPERTS // ep)] if experts else ["mlp."]
        for place in at_mlp:
            own[f"{place}linear_fc1.weight"] = (2 * INNER // tp, HIDDEN)
            own[f"{place}linear_fc2.weight"] = (HIDDEN, INNER // tp)
        found |= {f"decoder.layers.{i}.{n}": s for n, s in own.items()}
    if stage == mesh["pp"] - 1:
        found["decoder.final_layernorm.weight"] = (HIDDEN,)
        if not tied or mesh["pp"] > 1:
            found["output_layer.weight"] = vocab
    return found, first


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "axes",
    [{}, {"tp": 2}, {"tp": 8}, {"pp": 2, "tp": 2}, {"pp": 3}, {"dp": 2, "ep": 2}, {"pp": 2, "ep": 4, "tp": 2}],
    ids=str,
)
def test_every_number_has_one_place(axes, tied):
    """The main boxes of all ranks cover each weight once; rows that are in no box are padding."""
    mesh = Mesh(axes)
    model = plain(experts=mesh["ep"] > 1, tied=tied)
    counted = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in model.shapes.items()}
    for rank in range(mesh.size):
        parallel = Parallel(mesh, mesh.coordinates(rank), {})
        shapes, first = parameters(mesh, parallel.at, experts=mesh["ep"] > 1, tied=tied)
        converter = Converter(model, parallel, first)
        for name, shape in shapes.items():
            parameter, rows = torch.zeros(shape), 0
            for part in converter.parts(name, parameter):
                shard = part.shard(parameter, main=converter.main(part, expert=".experts." in name))
                counted[part.name][tuple(slice(a, b) for a, b in shard.box)] += int(shard.main)
                rows += part.rows[1] - part.rows[0]
                assert shard.tensor.numel() == 0 or shard.tensor.data_ptr() >= parameter.data_ptr()
            assert rows == shape[0] or name in ("embedding.word_embeddings.weight", "output_layer.weight")
    assert all(bool((count == 1).all()) for count in counted.values())


@settings(deadline=None)
@given(st.data())
def test_flat_pieces_are_boxes(data):
    """However a parameter laid out flat is cut, the pieces of the cuts make up its box."""
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    stacked = data.draw(st.booleans())
    whole = torch.zeros(3, rows + 4, width) if stacked else torch.zeros(rows + 4, width)
    part = Part((first, last), "w", tuple(whole.shape), (1, 2, 0) if stacked else (2, 0))
    parameter = torch.arange(1.0, rows * width + 1).view(rows, width)
    cuts = sorted(data.draw(st.sets(st.integers(0, rows * width))) | {0, rows * width})
    seen = torch.zeros_like(whole)
    for low, high in pairwise(cuts):
        for shard in part.pieces(parameter.view(-1)[low:high], low, width, main=True):
            at = tuple(slice(a, b) for a, b in shard.box)
            whole[at], seen[at] = shard.tensor, seen[at] + 1
    wanted = part.shard(parameter, main=True)
    box = tuple(slice(a, b) for a, b in wanted.box)
    assert torch.equal(whole[box], wanted.tensor) and int(seen.sum()) == wanted.tensor.numel() == int(seen[box].sum())


def test_vectors_are_cut_too():
    part = Part((1, 4), "b", (9,), (5,))
    pieces = list(part.pieces(torch.arange(3.0), 2, 1, main=False))
    assert [(s.box, s.tensor.tolist(), s.main) for s in pieces] == [(((6, 8),), [0.0, 1.0], False)]


def test_sequences_are_dealt_out_along_cp():
    """Each rank has one part from the front and one from the back; together they are the padded sequence."""
    ids, seen = torch.arange(1, 12).view(1, 11), []
    for rank in range(2):
        fed = feed(ids, lambda: None, Parallel(Mesh({"cp": 2}), {"cp": rank}, {}), torch.device("cpu"), filler=0)
        assert fed.width == 11
        seen += list(zip(fed.positions[0].tolist(), fed.ids[0].tolist(), strict=True))
    assert [token for _, token in sorted(seen)] == [*range(1, 12), 0]
    assert seen[0][0] == 0 and seen[5][0] == 11  # the first rank has both ends


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_what_a_mesh_cannot_have(axes):
    with pytest.raises(PlanError) as told:
        Parallel.of(axes)
    assert told.value.fix


def test_stages_are_those_of_the_layout():
    for layers in range(1, 9):
        for count in range(1, layers + 1):
            held = [stage.count("decoder") for stage in stages(layers, count)]
            assert held == [b - a for a, b in (layers_of_stage(layers, count, i) for i in range(count))]
