import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import ModelError
from flowrl.workers.weights.weight_boxes import Shard, digest, sums

SHAPES = {"a": (7, 5), "b": (11,), "c": (), "d": (3, 2, 4), "e": (0, 3)}


def full(dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    return {n: (torch.randn(s, generator=made) * 40).to(dtype) for n, s in SHAPES.items()}


def whole(weights):
    return [Shard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in weights.items()]


def of(weights):
    return digest([sums(whole(weights))])


@st.composite
def cuts(draw):
    """Cuts by weight and dim, the rank of each part, and how many hold a copy that does not count."""
    where = {n: [sorted(draw(st.sets(st.integers(0, k), max_size=3))) for k in s] for n, s in SHAPES.items()}
    return where, draw(st.randoms(use_true_random=False))


def parts(shape, where):
    """Boxes that are all of a shape, cut along each dim."""
    boxes = [()]
    for size, ends in zip(shape, where, strict=True):
        boxes = [(*b, r) for b in boxes for r in zip([0, *ends], [*ends, size], strict=True)]
    return boxes


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_the_digest_is_that_of_any_cut(case):
    where, chance = case
    weights = full()
    ranks = {0: [], 1: [], 2: []}
    for name, tensor in weights.items():
        for box in parts(SHAPES[name], where[name]):
            part = tensor[tuple(slice(a, b) for a, b in box)]
            shard = Shard(name, SHAPES[name], tuple(a for a, _ in box), part)
            assert shard.box == box
            owner = chance.randrange(3)
            ranks[owner].append(shard)
            if chance.random() < 0.5:  # a replica
                ranks[(owner + 1) % 3].append(Shard(name, shard.shape, shard.offset, part.clone(), main=False))
    for shards in ranks.values():
        chance.shuffle(shards)
    assert digest(sums(s) for s in ranks.values()) == of(weights)
    assert digest(sums(s) for s in reversed(ranks.values())) == of(weights)


def test_a_large_tensor_is_taken_in_pieces(monkeypatch):
    weights = full()
    before = of(weights)
    for size in (1, 3, 10):
        monkeypatch.setattr("flowrl.workers.weights.weight_boxes._CHUNK", size)
        assert of(weights) == before


def test_columns_and_transposed_memory_count_by_place():
    tensor = full()["a"]
    turned = tensor.t().contiguous().t()
    assert not turned.is_contiguous()
    assert of({"a": turned}) == of({"a": tensor})


CHANGES = {
    "two numbers swapped": lambda w: w["a"].view(-1)[[0, 9]].copy_(w["a"].view(-1)[[9, 0]].clone()),
    "the last bit of one": lambda w: w["b"].view(torch.int32)[4].bitwise_xor_(1),
    "the sign of one": lambda w: w["b"][4].neg_(),
    "two rows swapped": lambda w: w["a"].copy_(w["a"][[1, 0, 2, 3, 4, 5, 6]]),
    "the one without dims": lambda w: w["c"].add_(1),
    "all moved by one": lambda w: w["d"].copy_(w["d"].roll(1)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_shows(what):
    weights = full()
    before = of(weights)
    if what.startswith("two numbers"):
        flat = weights["a"].view(-1)
        flat[0], flat[9] = flat[9].clone(), flat[0].clone()
    else:
        CHANGES[what](weights)
    assert of(weights) != before


def test_every_single_bit_shows():
    tensor = torch.ones(4)
    seen = {of({"w": tensor})}
    for place in range(4):
        for bit in range(32):
            other = tensor.clone()
            other.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            seen.add(of({"w": other}))
    assert len(seen) == 129


def test_a_box_at_another_place_shows():
    tensor = torch.arange(1.0, 5.0)

    def at(first, second):
        return digest([sums([Shard("w", (8,), (first,), tensor[:2]), Shard("w", (8,), (second,), tensor[2:])])])

    assert len({at(0, 2), at(2, 0), at(0, 4), at(4, 6)}) == 4


def test_names_shapes_and_dtypes_are_in_it():
    tensor = torch.ones(4)
    seen = {
        of({"w": tensor}),
        of({"v": tensor}),
        of({"w": tensor.view(2, 2)}),
        of({"w": tensor.view(1, 4)}),
        of({"w": tensor.double()}),
        of({"w": tensor.to(torch.bfloat16)}),
        of({"w": tensor, "v": tensor[:0]}),
        of({}),
    }
    assert len(seen) == 8


def test_numbers_are_taken_in_the_dtype_asked_for():
    weights = full()
    small = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    assert digest([sums(whole(weights), torch.bfloat16)]) == of(small) != of(weights)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool"])
def test_any_dtype_will_do(dtype):
    weights = full(getattr(torch, dtype))
    name = dtype
    halves = [Shard("a", (7, 5), (0, 0), weights["a"][:3]), Shard("a", (7, 5), (3, 0), weights["a"][3:])]
    assert digest(sums([h]) for h in halves) == of({"a": weights["a"]}), name
    changed = weights["a"].clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    assert of({"a": changed}) != of({"a": weights["a"]})


def test_both_zeros_are_the_same_number():
    assert of({"w": torch.tensor([0.0, -0.0])}) == of({"w": torch.tensor([-0.0, 0.0])})


def test_copies_count_once_or_not_at_all():
    tensor = torch.ones(4)
    main, copy = Shard("w", (4,), (0,), tensor), Shard("w", (4,), (0,), tensor, main=False)
    assert digest([sums([main]), sums([copy])]) == digest([sums([main])]) != digest([sums([copy])])


def test_ranks_that_differ_in_dtype_or_shape_have_no_digest():
    one = sums([Shard("w", (4,), (0,), torch.ones(2))])
    for other in (Shard("w", (4,), (2,), torch.ones(2).double()), Shard("w", (5,), (2,), torch.ones(2))):
        with pytest.raises(ModelError, match="w is"):
            digest([one, sums([other])])


def test_a_shard_gives_views_by_place_in_the_whole():
    shard = Shard("w", (8, 4), (2, 0), torch.zeros(3, 4))
    shard.view(((3, 4), (1, 3))).fill_(1)
    assert shard.tensor.tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    scalar = Shard("c", (), (), torch.tensor(2.0))
    scalar.view(()).fill_(3)
    assert scalar.box == () and float(scalar.tensor) == 3
