"""Batches and columns: every row operation against plain Python lists, on rows that hypothesis makes up."""

import copy
import json
import math
import operator
import pickle
import struct
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import DataError, FieldError, RowsError

quick = settings(max_examples=60, deadline=None)
torch.set_num_threads(1)

small = st.floats(-8, 8, width=32)
any_float = st.floats(width=32)
keys = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=0, max_size=12, unique=True)


@st.composite
def batches(draw, floats=any_float, min_rows=0):
    """Ragged, fixed, two-dimensional and object columns; some rows are empty, perhaps there is no row."""
    names = draw(keys.filter(lambda k: len(k) >= min_rows))
    n = len(names)
    ragged = [draw(st.lists(floats, max_size=4)) for _ in range(n)]
    flags = [[draw(st.booleans()) for _ in row] for row in ragged]
    rewards = [draw(floats) for _ in range(n)]
    texts = [draw(st.text(max_size=3)) for _ in range(n)]
    column = Column.of(ragged, dim="response", dtype="f32")
    return Batch.of(
        names,
        logprobs=column,
        mask=Column.packed(
            torch.tensor([x for row in flags for x in row], dtype=torch.bool), column.lengths, "response"
        ),
        rewards=Column.of(rewards, dtype="f32"),
        pair=Column.of(torch.arange(2 * n).reshape(n, 2)),
        text=Column.of(texts, dtype="any"),
    )


def rows_of(batch):
    """The oracle's view: key -> {field: plain value, floats by their bits}."""

    def plain(x):
        if isinstance(x, float):
            return struct.pack("<d", x)
        return [plain(y) for y in x] if isinstance(x, list) else x

    listed = {name: column.to_list() for name, column in batch.columns.items()}
    return {key: {name: plain(listed[name][i]) for name in listed} for i, key in enumerate(batch.keys)}


def same(a, b):
    return a.keys == b.keys and rows_of(a) == rows_of(b)


# Columns


@pytest.mark.parametrize(
    ("data", "dim", "dtype", "type_", "listed"),
    [
        ([1, 2], None, None, "i64[]", [1, 2]),
        ([1, 2.5], None, None, "f32[]", [1.0, 2.5]),
        ([True, False], None, None, "bool[]", [True, False]),
        (["a", "b"], None, None, "any", ["a", "b"]),
        ([{"a": 1}, None], None, None, "any", [{"a": 1}, None]),
        ([[1], [2, 3]], None, None, "any", [[1], [2, 3]]),
        ([[1], [], [2, 3]], "token", "i32", "i32[*token]", [[1], [], [2, 3]]),
        ([torch.tensor([1.0]), torch.tensor([])], "response", None, "f32[*response]", [[1.0], []]),
        (torch.tensor([[1, 2], [3, 4]]), "token", None, "i64[*token]", [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]]), None, None, "i64[2]", [[1, 2], [3, 4]]),
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], None, None, "i64[2]", [[1, 2], [3, 4]]),
        ([], "response", "f32", "f32[*response]", []),
        ([1, 2], None, "bf16", "bf16[]", [1.0, 2.0]),
        ([1, 2], None, "any", "any", [1, 2]),
        ([[[1.0, 2.0]], []], "response", None, "f32[*response, 2]", [[[1.0, 2.0]], []]),
    ],
)
def test_column_of(data, dim, dtype, type_, listed):
    column = Column.of(data, dim=dim, dtype=dtype)
    assert column.type == type_
    assert column.to_list() == listed
    assert len(column) == len(listed)
    assert [x.tolist() if hasattr(x, "tolist") else x for x in column] == listed
    assert [x.tolist() if hasattr(x, "tolist") else x for x in (column[i] for i in range(len(column)))] == listed


def test_column_of_column_renames_and_casts():
    column = Column.of([[1, 2], [3]], dim="token", dtype="i32")
    assert Column.of(column) is column
    assert Column.of(column, dim="response").type == "i32[*response]"
    assert Column.of(column, dtype="f32").to_list() == [[1.0, 2.0], [3.0]]


def test_packed_does_not_copy():
    values = torch.arange(3.0)
    assert Column.packed(values, [1, 0, 2], "response").values is values


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Column.packed(torch.arange(3), [1, 1], "token"), RowsError, "add up to 2"),
        (lambda: Column.of(torch.tensor([1, 2]), dim="token"), FieldError, "has no dim 'token'"),
        (lambda: Column.of([torch.zeros(1), torch.zeros(2)]), FieldError, "ragged"),
        (lambda: Column.of([1], dtype="f16"), FieldError, "'f16' is no dtype"),
        (lambda: Column.of(["x"], dtype="f32"), FieldError, "no numbers"),
        (lambda: Column.of(torch.zeros(2, dtype=torch.uint8)), FieldError, "uint8"),
        (lambda: Column.of(torch.tensor(1.0)), FieldError, "one value per row"),
        (lambda: Column.of([1, 2]).offsets, FieldError, "no ragged dim"),
        (lambda: Column.of([1, 2]).padded(0), FieldError, "no ragged dim"),
        (lambda: bool(Column.of([True, False])), FieldError, "neither true nor false"),
        (lambda: Column.of([]).min(), DataError, "no element"),
        (lambda: Column.of([[]], dim="token").max(), DataError, "no element"),
        (lambda: Column.of([1]) + Column.of([1, 2]), RowsError, "1 rows"),
        (
            lambda: Column.of([[1], [2]], dim="t") * Column.of([[1, 2], []], dim="t"),
            RowsError,
            "differ in row 0",
        ),
        (lambda: Column.of([1.0]) + None, FieldError, "cannot be combined with None"),
        (lambda: Column.of([1.0]).with_values(torch.zeros(2)), RowsError, "cannot take their place"),
    ],
)
def test_wrong_columns(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_columns_and_batches_do_not_change():
    batch = Batch.of(2, rewards=[1.0, 2.0])
    with pytest.raises(AttributeError):
        batch.rewards.values = torch.zeros(2)
    with pytest.raises(FieldError, match="does not change"):
        batch.rewards = Column.of([0.0, 0.0])
    with pytest.raises(TypeError):
        batch.columns["rewards"] = Column.of([0.0, 0.0])


def test_padded_sides():
    column = Column.of([[1, 2], [], [3]], dim="token")
    right, mask = column.padded(9)
    assert right.tolist() == [[1, 2], [9, 9], [3, 9]]
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    left, mask = column.padded(9, side="left")
    assert left.tolist() == [[1, 2], [9, 9], [9, 3]]
    assert mask.tolist() == [[True, True], [False, False], [False, True]]
    wide, _ = Column.of([[[1.0, 2.0]], []], dim="t").padded(0)
    assert wide.tolist() == [[[1.0, 2.0]], [[0.0, 0.0]]]
    assert Column.of([], dim="token").padded(0)[0].shape == (0, 0)


def test_slices_and_negative_rows():
    column = Column.of([[1], [2, 3], [], [4]], dim="token")
    assert column[1:3].to_list() == [[2, 3], []]
    assert column[::-1].to_list() == [[4], [], [2, 3], [1]]
    assert column[3:1].to_list() == []
    assert column[-1].tolist() == [4]
    with pytest.raises(IndexError):
        column[4]


@pytest.mark.parametrize("dtype", ["i32", "i64", "f32", "f64", "bf16", "bool"])
def test_equal_means_bits(dtype):
    one = Column.of([[1, 0], [1]], dim="t", dtype=dtype)
    assert one.equal(Column.of([[1, 0], [1]], dim="t", dtype=dtype))
    assert not one.equal(Column.of([[1], [0, 1]], dim="t", dtype=dtype))
    assert not one.equal(Column.of([[1, 0], [0]], dim="t", dtype=dtype))
    assert not one.equal(Column.of([[1, 0], [1]], dim="u", dtype=dtype))


def test_equal_of_special_floats():
    nan = Column.of([float("nan"), 0.0])
    assert nan.equal(Column.of([float("nan"), 0.0]))
    assert not nan.equal(Column.of([float("nan"), -0.0]))
    assert not nan.equal(Column.of([float("nan"), 0.0], dtype="f64"))


# Arithmetic against plain Python

ragged_pairs = st.lists(st.lists(st.tuples(small, small), max_size=3), max_size=5)
ARITHMETIC = [getattr(operator, name) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")]


def close(a, b):
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(close, a, b))
    return type(a) is type(b) and (a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6))


@pytest.mark.parametrize("fn", ARITHMETIC, ids=lambda f: f.__name__)
@quick
@given(rows=ragged_pairs, number=small)
def test_arithmetic_per_element(fn, rows, number):
    left = [[a for a, _ in row] for row in rows]
    right = [[b for _, b in row] for row in rows]
    per_row = [float(i) - 1 for i in range(len(rows))]
    a, b = (Column.of(x, dim="response", dtype="f32") for x in (left, right))
    c = Column.of(per_row, dtype="f32")
    assert close(fn(a, b).to_list(), [[fn(x, y) for x, y in row] for row in rows])
    assert close(fn(a, number).to_list(), [[fn(x, number) for x in row] for row in left])
    assert close(fn(number, a).to_list(), [[fn(number, x) for x in row] for row in left])
    assert close(fn(a, c).to_list(), [[fn(x, r) for x in row] for row, r in zip(left, per_row, strict=True)])
    assert close(fn(c, a).to_list(), [[fn(r, x) for x in row] for row, r in zip(left, per_row, strict=True)])
    assert fn(c, a).dim == "response"


@pytest.mark.parametrize("fn", [operator.truediv, operator.floordiv, operator.mod, operator.pow])
@quick
@given(rows=st.lists(st.integers(-20, 20), min_size=1, max_size=5), number=st.integers(1, 5))
def test_whole_numbers_follow_python(fn, rows, number):
    column = Column.of(rows)
    assert close(fn(column, number).to_list(), [fn(x, number) for x in rows])
    positive = column * 0 + number
    assert close(fn(column, positive).to_list(), [fn(x, number) for x in rows])
    if fn is not operator.pow:
        assert close(fn(7, positive).to_list(), [fn(7, number) for _ in rows])


def test_reflected_power():
    assert (2 ** Column.of([1, 3])).to_list() == [2, 8]


@quick
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6))
def test_bools(pairs):
    a, b = (Column.of([p[i] for p in pairs], dtype="bool") for i in (0, 1))
    assert (a & b).to_list() == [x and y for x, y in pairs]
    assert (a | b).to_list() == [x or y for x, y in pairs]
    assert (True & a).to_list() == [x for x, _ in pairs]
    assert (~a).to_list() == [not x for x, _ in pairs]
    assert (a + b).to_list() == [x + y for x, y in pairs]  # True counts as 1, as in Python
    assert (-a).to_list() == [-x for x, _ in pairs]
    assert a.sum() == sum(x for x, _ in pairs)


def test_unary():
    column = Column.of([[1.0, -2.0], []], dim="t")
    assert (-column).to_list() == [[-1.0, 2.0], []]
    assert abs(column).to_list() == [[1.0, 2.0], []]


def test_objects_take_part():
    kind = Column.of(["easy", "hard", "easy"])
    assert (kind == "easy").to_list() == [True, False, True]
    assert (kind + "!").to_list() == ["easy!", "hard!", "easy!"]
    assert (Column.of([1, 2], dtype="any") * Column.of([2.0, 3.0])).to_list() == [2.0, 6.0]
    assert Column.of([1, 2], dtype="any").mean() == 1.5
    with pytest.raises(FieldError, match="no numbers"):
        kind.mean()


def test_row_values_are_spread_over_trailing_dims():
    pairs = Column.of([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], dim="t")
    assert (pairs * Column.of([1.0, 10.0])).to_list() == [[[1.0, 2.0]], [[30.0, 40.0], [50.0, 60.0]]]
    assert pairs.row_sum().to_list() == [3.0, 18.0]
    assert pairs.row_mean().to_list() == [1.5, 4.5]


@quick
@given(st.lists(st.lists(small, max_size=4), max_size=6))
def test_reductions(rows):
    column = Column.of(rows, dim="response", dtype="f32")
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat) if flat else 0.0
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat)) if flat else 0.0
    assert column.mean() == pytest.approx(mean, abs=1e-9)
    assert column.sum() == pytest.approx(sum(flat), abs=1e-9)
    assert column.std() == pytest.approx(std, abs=1e-6)
    if flat:
        assert (column.min(), column.max()) == (min(flat), max(flat))
    assert all(type(x) is float for x in (column.mean(), column.sum(), column.std()))
    assert column.row_sum().to_list() == pytest.approx([sum(row) for row in rows], abs=1e-5)
    assert column.row_mean().to_list() == pytest.approx([sum(row) / max(len(row), 1) for row in rows], abs=1e-5)
    assert column.lengths_column().to_list() == [len(row) for row in rows]
    assert [c.type for c in (column.row_sum(), column.row_mean(), column.lengths_column())] == [
        "f32[]",
        "f32[]",
        "i64[]",
    ]


@quick
@given(batches(floats=small), st.integers(1, 4))
def test_row_sums_do_not_depend_on_the_split(batch, parts):
    whole = batch.logprobs.row_sum()
    split = [part.logprobs.row_sum().to_list() for part in batch.split(parts)]
    assert [x for part in split for x in part] == whole.to_list()


# Batches


def test_of():
    batch = Batch.of(rewards=[1.0, 2.0], prompt=["a", "b"])
    assert batch.keys == ((0,), (1,))
    assert batch.fields == ("rewards", "prompt")
    assert Batch.of([5, 7], x=[1, 2]).keys == ((5,), (7,))
    assert Batch.of([(5, 0), (5, 1)], x=[1, 2]).keys == ((5, 0), (5, 1))
    assert len(Batch.of(3)) == Batch.of(3).count() == 3
    assert "rewards" in batch and "costs" not in batch


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda b: b.reward, FieldError, "Did you mean 'rewards'"),
        (lambda b: b["costs"], FieldError, "have prompt, rewards"),
        (lambda b: b.select("reward"), FieldError, "no field 'reward'"),
        (lambda b: b.drop("reward"), FieldError, "no field 'reward'"),
        (lambda b: b.rename(reward="costs"), FieldError, "no field 'reward'"),
        (lambda b: b.rename(rewards="prompt"), FieldError, "rename adds 'prompt', which the batch"),
        (
            lambda b: b.with_columns({"rewards": Column.of([1, 2])}),
            FieldError,
            r"Write batch.drop\('rewards'\).with_columns",
        ),
        (lambda b: b.with_columns({"costs": Column.of([1])}), RowsError, "'costs' has 1 rows"),
        (lambda b: Batch.of([1, 1], x=[0, 0]), RowsError, r"\(1,\) is given to two"),
        (lambda b: Batch.of(2, x=[0]), RowsError, "'x' has 1 rows"),
        (
            lambda b: b | Batch.of([0, 5], x=[1, 2]),
            RowsError,
            r"only the left has \(1,\); only the right has \(5,\)",
        ),
        (lambda b: b | Batch.of(1, x=[1]), RowsError, r"only the left has \(1,\)"),
        (lambda b: b | Batch.of(2, rewards=[0.0, 0.0]), FieldError, "written twice"),
        (lambda b: b.take([0, 0]), RowsError, "comes twice|taken twice"),
        (lambda b: b.take([2]), RowsError, "Row 2 of a batch of 2"),
        (lambda b: b.take([-1]), RowsError, "Row -1"),
        (lambda b: b.take_keys([(9, 9)]), RowsError, r"\(9, 9\)"),
        (lambda b: b.filter([True]), RowsError, "filter has 1 rows"),
        (lambda b: b.filter(b.rewards), FieldError, r"f32\[\]"),
        (lambda b: b.split_sizes([1]), RowsError, "cannot be split"),
        (lambda b: b.split_sizes([3, -1]), RowsError, "cannot be split"),
        (lambda b: b.expand(-1), RowsError, "-1 times"),
        (lambda b: b.concat(b), RowsError, "two rows"),
        (
            lambda b: b.concat(Batch.of([7], rewards=[1.0])),
            FieldError,
            "'prompt' is a field of some",
        ),
        (
            lambda b: b.concat(Batch.of([7], rewards=[1], prompt=["c"])),
            FieldError,
            r"f32\[\], i64\[\]",
        ),
        (lambda b: b.group_reduce("rewards", "median"), FieldError, "'median'"),
        (lambda b: b.group_reduce(Column.of([[1.0], []], dim="t"), "mean"), FieldError, "row_mean"),
        (
            lambda b: b.with_columns({"odd": Column.of([{1}, {2}])}).to_record(),
            FieldError,
            "'odd' cannot be written",
        ),
    ],
)
def test_wrong_batches(make, error, says):
    batch = Batch.of(2, rewards=[1.0, 2.0], prompt=["a", "b"])
    with pytest.raises(error, match=says) as caught:
        make(batch)
    assert caught.value.report().startswith(f"{error.__name__}: ")


def test_hasattr_and_getattr():
    batch = Batch.of(1, rewards=[1.0])
    assert hasattr(batch, "rewards") and not hasattr(batch, "costs")
    assert getattr(batch, "costs", None) is None


def test_rename_select_drop():
    batch = Batch.of(2, rewards=[1.0, 2.0], prompt=["a", "b"])
    assert batch.rename(rewards="costs").costs is batch.rewards
    assert batch.rename(rewards="prompt", prompt="rewards").prompt is batch.rewards
    assert batch.select("prompt").fields == ("prompt",)
    assert batch.drop("prompt").fields == ("rewards",)


@quick
@given(batches(), st.randoms())
def test_join_takes_any_order(batch, random):
    left, right = batch.select("logprobs", "text"), batch.drop("logprobs")
    order = list(range(len(batch)))
    random.shuffle(order)
    joined = left | right.take(order)  # both have `text`, with equal contents
    assert joined.keys == batch.keys
    assert rows_of(joined) == rows_of(batch)
    assert Counter(joined.fields) == Counter(batch.fields)


@quick
@given(batches(), st.data())
def test_take_and_filter(batch, data):
    kept = [data.draw(st.booleans()) for _ in batch.keys]
    index = [i for i, keep in enumerate(kept) if keep]
    expected = {key: row for (key, row), keep in zip(rows_of(batch).items(), kept, strict=True) if keep}
    for result in (
        batch.filter(kept),
        batch.filter(torch.tensor(kept, dtype=torch.bool)),
        batch.filter(Column.of(kept, dtype="bool")),
        batch.take(index),
        batch.take(torch.tensor(index, dtype=torch.int64)),
    ):
        assert rows_of(result) == expected
        assert list(result.keys) == list(expected)
        assert [c.type for c in result.columns.values()] == [c.type for c in batch.columns.values()]
    order = data.draw(st.permutations(range(len(batch))))
    taken = batch.take(order)
    assert list(taken.keys) == [batch.keys[i] for i in order]
    assert rows_of(taken) == rows_of(batch)
    assert taken.sort().keys == tuple(sorted(batch.keys))
    assert rows_of(taken.sort()) == rows_of(batch)


@quick
@given(batches(), st.integers(0, 3))
def test_expand_and_take_keys(batch, n):
    expanded = batch.expand(n)
    rows = rows_of(batch)
    assert list(expanded.keys) == [(*key, i) for key in batch.keys for i in range(n)]
    assert rows_of(expanded) == {key: rows[key[:-1]] for key in expanded.keys}
    assert same(batch.take_keys(expanded.keys), expanded)
    assert batch.take_keys(batch.keys) is batch
    backwards = batch.keys[::-1]
    assert batch.take_keys(backwards).keys == backwards
    assert rows_of(batch.take_keys(backwards)) == rows


def test_take_keys_prefers_the_longest_prefix():
    batch = Batch.of([(0,), (0, 1)], x=[1, 2])
    assert batch.take_keys([(0, 0, 3), (0, 1, 3), (0,)]).x.to_list() == [1, 2, 1]


@quick
@given(batches(), st.integers(1, 6))
def test_split_and_concat(batch, n):
    parts = batch.split(n)
    sizes = [len(part) for part in parts]
    assert len(parts) == n and sum(sizes) == len(batch) and max(sizes) - min(sizes) <= 1
    back = Batch.concat(*parts)
    assert same(back, batch) and back.digest() == batch.digest()
    assert [c.type for c in back.columns.values()] == [c.type for c in batch.columns.values()]
    assert back.logprobs.lengths is back.mask.lengths  # what shared its lengths shares them again
    assert all(part.logprobs.lengths is part.mask.lengths for part in parts)


@quick
@given(batches(floats=small))
def test_groups(batch):
    expected = {}
    for i, key in enumerate(batch.keys):
        expected.setdefault(key[0], []).append(i)
    assert batch.groups() == list(expected.values())
    index, count = batch.group_index()
    assert count == len(expected)
    assert [list(expected).index(key[0]) for key in batch.keys] == index.tolist()
    rewards = batch.rewards.to_list()
    for how in ("mean", "std"):
        result = batch.group_reduce("rewards", how)
        assert result.type == "f32[]"
        for rows in expected.values():
            xs = [rewards[i] for i in rows]
            mean = sum(xs) / len(xs)
            value = mean if how == "mean" else math.sqrt(sum((x - mean) ** 2 for x in xs) / len(xs))
            assert [result[i] for i in rows] == pytest.approx([value] * len(rows), abs=1e-5)


def test_the_groups_that_are_handed_out_are_copies():
    batch = Batch.of([(1, 0), (1, 1)], x=[0, 0])
    batch.groups()[0].clear()
    assert batch.groups() == [[0, 1]]


# Seeds


@quick
@given(batches(min_rows=1), st.randoms(), st.integers(1, 4))
def test_seeds_belong_to_rows(batch, random, n):
    batch = batch.with_call(CallInfo(seed=3, program="grpo", step=2, op="actor.generate"))
    seeds = dict(zip(batch.keys, batch.row_seeds("x", 1).tolist(), strict=True))
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds.values())
    order = list(range(len(batch)))
    random.shuffle(order)
    for part in batch.take(order).drop("text").split(n):
        assert part.row_seeds("x", 1).tolist() == [seeds[key] for key in part.keys]


def test_seeds_depend_on_every_part_of_the_call():
    batch = Batch.of(1, x=[0])
    calls = [
        CallInfo(),
        CallInfo(seed=1),
        CallInfo(program="a"),
        CallInfo(step=1),
        CallInfo(op="a"),
        CallInfo(occurrence=1),
    ]
    seeds = [int(batch.with_call(c).row_seeds()[0]) for c in calls]
    seeds += [int(batch.row_seeds(*extra)[0]) for extra in ((1,), ("1",), (1, 1), (11,))]
    assert len(set(seeds)) == len(seeds)
    assert int(batch.row_seeds()[0]) == seeds[0]


def test_seeds_stay_the_same_over_releases():
    batch = Batch.of([(4, 2)], x=[0]).with_call(CallInfo(7, "grpo", 3, "actor.generate", 1))
    assert batch.row_seeds().tolist() == [774472370551500110]  # another hash would break every resumed run


# Records


def special(dtype):
    values = [0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), 3.1415926]
    if dtype == "bool":
        return [bool(x) for x in values]
    return [1, -2, 3, 2**31 - 1, -(2**31), 0, 5] if dtype in ("i32", "i64") else values


@pytest.mark.parametrize("dtype", ["i32", "i64", "f32", "f64", "bf16", "bool"])
def test_records_keep_every_bit(dtype):
    values = special(dtype)
    batch = Batch.of(
        [(0, 0), (0, 1), (3,)],
        ragged=Column.of([values[:3], [], values[3:]], dim="t", dtype=dtype),
        fixed=Column.of(values[2:5], dtype=dtype),
        wide=Column.of(torch.tensor(values[:6], dtype=Column.of(values, dtype=dtype).values.dtype).reshape(3, 2)),
        thing=[{"a": [1, None, "ü"]}, "x", 2.5],
    )
    for back in (
        Batch.from_record(json.loads(json.dumps(batch.to_record()))),
        Batch.from_tensors(batch.tensors(), json.loads(json.dumps(batch.meta()))),
        pickle.loads(pickle.dumps(batch)),  # noqa: TID251
        copy.deepcopy(batch),
    ):
        assert back.keys == batch.keys
        for name, column in batch.columns.items():
            assert back[name].type == column.type
            assert back[name].equal(column), name
        assert back.digest() == batch.digest()


@quick
@given(batches())
def test_any_batch_round_trips(batch):
    back = Batch.from_record(json.loads(json.dumps(batch.to_record())))
    assert same(back, batch) and back.digest() == batch.digest()
    stored = Batch.from_tensors(batch.tensors(), json.loads(json.dumps(batch.meta())))
    assert same(stored, batch) and stored.digest() == batch.digest()


def test_bits_of_an_odd_nan_survive():
    odd = torch.tensor([0x7FC01234, -0x3FEDCC], dtype=torch.int32).view(torch.float32)
    batch = Batch.of(2, x=odd)
    back = Batch.from_record(json.loads(json.dumps(batch.to_record())))
    assert back.x.values.view(torch.int32).tolist() == odd.view(torch.int32).tolist()


def test_tensors_go_into_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    column = Column.of([[1.0], [2.0, 3.0]], dim="response")
    batch = Batch.of(2, one=column, two=column, three=column * 2, text=["a", "b"]).split(2)[1]
    save_file(batch.tensors(), tmp_path / "batch.safetensors")
    back = Batch.from_tensors(load_file(tmp_path / "batch.safetensors"), batch.meta())
    assert back.digest() == batch.digest()


@quick
@given(batches(min_rows=1))
def test_digest_tells_contents_apart(batch):
    assert batch.select(*reversed(batch.fields)).digest() == batch.digest()
    assert batch.drop("text").digest() != batch.digest()
    first = Column.of(["other", *batch.text.to_list()[1:]], dtype="any")
    changed = batch.drop("text").with_columns({"text": first})
    assert (changed.digest() == batch.digest()) == (batch.text[0] == "other")


def test_digest_sees_where_rows_end():
    a = Batch.of(2, x=Column.of([[1], [2, 3]], dim="t"))
    b = Batch.of(2, x=Column.of([[1, 2], [3]], dim="t"))
    assert a.digest() != b.digest()


# Devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_operations_on_a_device_give_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (24,), generator=generator)
    values = torch.randn(int(lengths.sum()), generator=generator)
    here = Batch.of(
        [(i // 4, i % 4) for i in range(24)],
        logprobs=Column.packed(values, lengths, "response"),
        rewards=torch.randn(24, generator=generator),
        text=[str(i) for i in range(24)],
    )
    there = here.to("cuda")
    assert there.logprobs.values.is_cuda and not there.logprobs.lengths.is_cuda
    order = torch.randperm(24, generator=generator)
    operations = [
        lambda b: b.take(order),
        lambda b: b.expand(2),
        lambda b: b.filter(b.rewards > 0),
        lambda b: b.take_keys([(3, 1, 7), (0, 2)]),
        lambda b: Batch.concat(*b.split(5)),
        lambda b: b.select("rewards") | b.drop("rewards").take(order),
        lambda b: Batch.from_record(b.to_record()),
        lambda b: b.drop("logprobs").with_columns({"logprobs": b.logprobs * b.rewards + 1}),
        lambda b: b.with_columns({"x": b.group_reduce("rewards", "std"), "y": b.logprobs.row_mean()}),
    ]
    for operation in operations:
        assert operation(there).to("cpu").digest() == operation(here).digest()
    for padded, expected in zip(there.logprobs.padded(0.0, "left"), here.logprobs.padded(0.0, "left"), strict=True):
        assert torch.equal(padded.cpu(), expected)
    assert there.logprobs.mean() == pytest.approx(here.logprobs.mean(), abs=1e-12)
    assert there.row_seeds().tolist() == here.row_seeds().tolist()


# Lightness


def test_import_is_light():
    code = "import flowrl.batch, sys; bad = {'torch', 'numpy'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)
