from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import PlanError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.model.model_shape import ModelShape, shape_named
from flowrl.placement.model.weight_layout import Layout, chunk, layers_of_stage

SMALL = {
    "model_type": "llama",
    "hidden_size": 10,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 29,
}
DENSE = ModelShape.from_config(SMALL, "dense")
TIED = ModelShape.from_config({**SMALL, "tie_word_embeddings": True}, "tied")
EXPERTS = ModelShape.from_config(
    {**SMALL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "experts",
)


def held(layout, rank):
    """The parts of a rank by name, for weights of which it holds something."""
    return {w.name: box for w, box in layout.holds(rank)}


def elements(layout, rank):
    """Every number that a rank holds, as (name, index)."""
    return {(w.name, at) for w, box in layout.holds(rank) for at in product(*(range(a, b) for a, b in box))}


def everything(model):
    return {(w.name, at) for w in model.weights() for at in product(*map(range, w.shape))}


@settings(deadline=None)  # the first example imports torch
@given(st.integers(1, 200), st.integers(1, 20))
def test_chunk_is_that_of_torch(length, pieces):
    torch = pytest.importorskip("torch")
    theirs = [(int(c[0]), int(c[-1]) + 1) for c in torch.arange(length).chunk(pieces)]
    ours = [chunk(length, pieces, i) for i in range(pieces)]
    assert [r for r in ours if r[0] < r[1]] == theirs


def test_tensor_parallel_splits_by_kind():
    first, last = (held(Layout(DENSE, Mesh.of("tp=2")), rank) for rank in (0, 1))
    at = "model.layers.3."
    assert first[at + "self_attn.q_proj.weight"] == ((0, 6), (0, 10))  # two heads of 3
    assert last[at + "self_attn.k_proj.weight"] == ((3, 6), (0, 10))
    assert last[at + "self_attn.o_proj.weight"] == ((0, 10), (6, 12))
    assert last[at + "mlp.gate_proj.weight"] == ((12, 24), (0, 10))
    assert last[at + "mlp.down_proj.weight"] == ((0, 10), (12, 24))
    assert last[at + "input_layernorm.weight"] == ((0, 10),)
    assert first["lm_head.weight"] == ((0, 15), (0, 10))  # 29 rows of vocabulary, rounded up
    assert last["model.embed_tokens.weight"] == ((15, 29), (0, 10))


def test_ranks_share_heads_where_there_are_too_few():
    parts = [held(Layout(DENSE, Mesh.of("tp=4")), r)["model.layers.0.self_attn.v_proj.weight"][0] for r in range(4)]
    assert parts == [(0, 3), (0, 3), (3, 6), (3, 6)]


def test_fsdp_splits_dim_0_of_what_tensor_parallelism_leaves():
    layout = Layout(DENSE, Mesh.of("fsdp=3,tp=2"))
    rank = layout.mesh.rank({"fsdp": 2, "tp": 1})
    parts = held(layout, rank)
    assert parts["model.layers.0.mlp.up_proj.weight"] == ((20, 24), (0, 10))
    assert parts["model.layers.0.mlp.down_proj.weight"] == ((8, 10), (12, 24))
    assert parts["model.layers.0.self_attn.k_proj.weight"] == ((5, 6), (0, 10))
    few = Layout(DENSE, Mesh.of("fsdp=8"))
    assert "model.layers.0.self_attn.k_proj.weight" not in held(few, 6)  # 6 rows over 8 ranks


def test_stages_have_layers_in_a_row_and_the_ends_where_they_belong():
    assert [layers_of_stage(5, 3, s) for s in range(3)] == [(0, 2), (2, 4), (4, 5)]
    stages = [held(Layout(TIED, Mesh.of("pp=3")), r) for r in range(3)]
    assert ["model.embed_tokens.weight" in s for s in stages] == [True, False, True]  # the last one as its head
    assert ["model.norm.weight" in s for s in stages] == [False, False, True]
    assert "model.layers.4.mlp.up_proj.weight" in stages[2]
    head = [held(Layout(DENSE, Mesh.of("pp=3")), r) for r in range(3)]
    assert ["lm_head.weight" in s for s in head] == [False, False, True]
    assert ["model.embed_tokens.weight" in s for s in head] == [True, False, False]


def test_experts_are_split_between_ranks_and_the_rest_copied():
    layout = Layout(EXPERTS, Mesh.of("ep=2,tp=2"))
    parts = held(layout, layout.mesh.rank({"ep": 1, "tp": 1}))
    assert parts["model.layers.0.mlp.experts.up_proj.weight"] == ((2, 4), (4, 8), (0, 10))
    assert parts["model.layers.0.mlp.experts.down_proj.weight"] == ((2, 4), (0, 10), (4, 8))
    assert parts["model.layers.0.mlp.gate.weight"] == ((0, 4), (0, 10))
    assert parts["model.layers.0.self_attn.q_proj.weight"] == ((6, 12), (0, 10))


meshes = st.fixed_dictionaries(
    {
        a: st.sampled_from(n)
        for a, n in {
            "pp": (1, 2, 3),
            "dp": (1, 2),
            "fsdp": (1, 2, 3, 7),
            "tp": (1, 2, 4),
            "ep": (1, 2, 4),
            "cp": (1, 2),
        }.items()
    }
).map(Mesh)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([DENSE, TIED, EXPERTS]), meshes, st.booleans())
def test_ranks_together_hold_the_model_and_copies_hold_the_same(model, mesh, fused):
    layout = Layout(model, mesh, fused)
    ranks = {layout.shard_of(rank): rank for rank in range(mesh.size)}
    assert set().union(*(elements(layout, rank) for rank in ranks.values())) == everything(model)
    for group in mesh.groups("dp", "cp"):
        assert len({layout.shard_of(r) for r in group}) == 1
    assert layout.copies * len(ranks) == mesh.size
    assert Layout(model, Mesh()).sizes() == [model.parameters * model.dtype_bytes]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 5]))
def test_fused_parts_are_chunks_of_the_tensors_laid_behind_each_other(tp, fsdp):
    """An engine's own way: take each rank's rows of q, k, v, lay them behind each other, chunk the result."""
    layout, plain = Layout(DENSE, Mesh({"fsdp": fsdp, "tp": tp}), fused=True), Layout(DENSE, Mesh({"tp": tp}))
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for t in range(tp):
            rows = []
            for name in names:
                full = f"model.layers.2.{name}.weight"
                rows += [(full, r) for r in range(*held(plain, t)[full][0])]
            size = -(-len(rows) // fsdp)
            for f in range(fsdp):
                parts = held(layout, layout.mesh.rank({"fsdp": f, "tp": t}))
                mine = {
                    (n, r)
                    for n, box in parts.items()
                    if n.startswith("model.layers.2.") and n[15:].startswith(names)
                    for r in range(*box[0])
                }
                assert mine == set(rows[f * size : (f + 1) * size])
    if fsdp == 1:  # then fused or not is the same set of numbers
        assert layout.shards == plain.shards


@pytest.mark.parametrize(
    ("name", "mesh", "said"),
    [
        ("llama-7b", "tp=3", ["32 attention heads, which tp=3 does not divide", "Write tp=4"]),
        ("qwen3-14b", "tp=16", ["40 attention heads"]),
        ("llama-7b", "tp=64", ["32 attention heads", "Write tp=32"]),
        ("llama-7b", "pp=33", ["32 layers, too few for pp=33"]),
        ("qwen3-30b-a3b", "ep=3", ["128 experts, which ep=3 does not divide", "Write ep=4"]),
    ],
)
def test_what_does_not_divide_is_named(name, mesh, said):
    with pytest.raises(PlanError) as caught:
        Layout(shape_named(name), Mesh.of(mesh))
    for part in said:
        assert part in str(caught.value)


def test_heads_of_keys_and_values_divide_or_are_divided():
    odd = ModelShape.from_config({**SMALL, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 30})
    with pytest.raises(PlanError, match="2 heads of keys and values, which tp=3 neither divides"):
        Layout(odd, Mesh.of("tp=3"))


@pytest.mark.parametrize("text", ["pp=2,dp=2,tp=2,folded_ep=4", "dp=2,cp=2,tp=2,folded_ep=4", "dp=4,tp=2,folded_ep=8"])
def test_folded_experts_are_whole_and_every_expert_lies_on_as_many_ranks(text):
    """What tp splits it still splits; each rank has its part of the experts, neighbours other ones."""
    mesh, model = Mesh.of(text), shape_named("qwen3-30b-a3b")
    layout, plain = Layout(model, mesh), Layout(model, Mesh(mesh.axes))
    copies: dict[str, list[tuple[int, int]]] = {}
    for rank in range(mesh.size):
        for weight, box in layout.holds(rank):
            if weight.kind.startswith("expert"):
                assert all(r == (0, n) for r, n in zip(box[1:], weight.shape[1:], strict=True)), "whole ones"
                copies.setdefault(weight.name, []).append(box[0])
        dense = {w.name: b for w, b in layout.holds(rank) if not w.kind.startswith("expert")}
        assert dense == {w.name: b for w, b in plain.holds(rank) if not w.kind.startswith("expert")}
    parts = model.experts // mesh.folded
    times = mesh.size // mesh["pp"] // mesh.folded
    for ranges in copies.values():
        assert sorted(ranges) == sorted([(i * parts, (i + 1) * parts) for i in range(mesh.folded)] * times)


def test_experts_that_do_not_divide_are_named():
    with pytest.raises(PlanError, match="128 experts, which folded_ep=3 does not divide") as caught:
        Layout(shape_named("qwen3-30b-a3b"), Mesh.of("dp=3,folded_ep=3"))
    assert caught.value.fix == "Write folded_ep=2."
