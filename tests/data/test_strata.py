"""Exact mixtures and strata: how many rows of each a batch has, where they go on, and what has no strata."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from byte_tokenizer import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import data
from flowrl.data.identity import identity
from flowrl.errors import DataError


def numbered(name, n=None, **options):
    """Prompts ``math0``, ``math1``, ...: n of them, or without end."""
    return data.generated(lambda i: {"prompt": f"{name}{i}"}, size=n, **{"batch": 99, **options})


def exact(weights, batch):
    return data.mix({name: numbered(name) for name in weights}, weights=weights, batch=batch, exact=True)


def names(cursor, n=None):
    return [name for name, _ in cursor.draw(n)]


LEVELS = [{"prompt": f"p{i}", "level": level} for i, level in enumerate("aaaabbaccb")]  # 5 a, 3 b, 2 c


# -- exact mixtures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "batch", "expected"),
    [
        ({"a": 1, "b": 1}, 8, {"a": 4, "b": 4}),
        ({"a": 3, "b": 1}, 8, {"a": 6, "b": 2}),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, {"a": 1, "b": 2, "c": 7}),
        ({"a": 1, "b": 1, "c": 2, "d": 4}, 16, {"a": 2, "b": 2, "c": 4, "d": 8}),
    ],
)
def test_every_batch_has_its_share_of_each(weights, batch, expected):
    cursor = exact(weights, batch).cursor()
    assert [Counter(names(cursor)) for _ in range(20)] == [Counter(expected)] * 20


def test_shares_that_are_no_whole_numbers_are_made_good_later():
    cursor = exact({"a": 1, "b": 1, "c": 1}, 4).cursor()
    batches = [Counter(names(cursor)) for _ in range(6)]
    assert all(set(counts.values()) <= {1, 2} for counts in batches)
    assert sum(batches[:3], Counter()) == sum(batches[3:], Counter()) == Counter(a=4, b=4, c=4)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(0, 200))
def test_none_ever_has_a_whole_row_more_than_its_share(weights, draws):
    of = {str(i): weight for i, weight in enumerate(weights)}
    drawn = Counter(names(exact(of, 1).cursor(), draws))
    total = sum(weights)
    for name, weight in of.items():
        assert drawn[name] * total < draws * weight + total
        if len(of) == 2:
            assert drawn[name] * total > draws * weight - total
        if draws % total == 0:
            assert drawn[name] == draws * weight // total


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.sampled_from([2, 7, None]))
def test_exact_draws_resume_exactly(sizes, cut, size):
    def make():
        parts = {"a": numbered("a", size, repeat=size != 7), "b": numbered("b"), "c": numbered("c", 5)}
        return data.mix(parts, weights={"a": 2, "b": 1, "c": 1}, batch=4, exact=True)

    cursor, drawn, states = make().cursor(), [], []
    for n in sizes:
        states.append(json.loads(json.dumps(cursor.state())))
        drawn.append([(name, dict(row)) for name, row in cursor.draw(n)])
    at = min(cut, len(sizes) - 1)
    again = make().cursor()
    again.load_state(states[at])
    assert [[(name, dict(row)) for name, row in again.draw(n)] for n in sizes[at:]] == drawn[at:]


def test_it_ends_where_a_part_has_ended():
    mix = data.mix({"a": numbered("a", 3, repeat=False), "b": numbered("b")}, batch=4, exact=True)
    cursor = mix.cursor()
    assert [len(cursor.draw()) for _ in range(4)] == [4, 2, 0, 0]


def test_a_place_in_a_mixture_by_chance_is_none_in_an_exact_one():
    by_chance = data.mix({"a": numbered("a"), "b": numbered("b")}, batch=4)
    with pytest.raises(DataError, match="by chance, and now it is exact"):
        exact({"a": 1, "b": 1}, 4).cursor().load_state(by_chance.cursor().state())
    with pytest.raises(DataError, match="exact, and now it is by chance"):
        by_chance.cursor().load_state(exact({"a": 1, "b": 1}, 4).cursor().state())


# -- strata ------------------------------------------------------------------------------------------------------------


def test_strata_have_the_same_share_each_and_all_of_their_rows():
    source = data.stratified(data.rows(LEVELS, batch=6), by="level")
    cursor = source.cursor()
    drawn = [[row for _, row in cursor.draw()] for _ in range(15)]
    assert all(Counter(row["level"] for row in rows) == Counter(a=2, b=2, c=2) for rows in drawn)
    times = Counter(row["prompt"] for rows in drawn for row in rows)  # 30 of each stratum: of 5, 3 and 2 rows
    for row in LEVELS:
        assert times[row["prompt"]] == {"a": 6, "b": 10, "c": 15}[row["level"]]


def test_weights_say_the_shares_and_what_they_do_not_name_is_left_out():
    source = data.stratified(data.rows(LEVELS, batch=99), by="level", weights={"a": 3, "c": 1}, batch=8)
    cursor = source.cursor()
    for _ in range(5):
        batch = source.to_batch(cursor.draw(), 0, make_tokenizer())
        assert Counter(batch.level.to_list()) == Counter(a=6, c=2)
    assert set(source.schema()) == {"prompt", "prompt_ids", "level"} == set(batch.fields)


def test_numbers_are_values_too():
    rows = [{"prompt": f"p{i}", "level": i % 3} for i in range(9)]
    source = data.stratified(data.rows(rows, batch=4), by="level", weights={0: 1, 2: 1})
    assert Counter(row["level"] for _, row in source.cursor().draw()) == {0: 2, 2: 2}


def test_a_file_has_strata_by_name(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in LEVELS))
    source = data.stratified(data.jsonl(file, batch=4, shuffle=False), by="level", weights={"a": 1, "b": 1})
    cursor = source.cursor()
    drawn = [(name, row["prompt"]) for _ in range(3) for name, row in cursor.draw()]
    assert [p for name, p in drawn if name == "a"] == ["p0", "p1", "p2", "p3", "p6", "p0"]
    assert [p for name, p in drawn if name == "b"] == ["p4", "p5", "p9", "p4", "p5", "p9"]
    again = data.stratified(data.jsonl(file, batch=4, shuffle=False), by="level", weights={"a": 1, "b": 1})
    place = again.cursor()
    place.load_state(json.loads(json.dumps(cursor.state())))
    assert place.draw() == cursor.draw()
    with pytest.raises(DataError, match="not known before") as refused:
        data.stratified(data.jsonl(file, batch=4), by="level")
    assert "weights=" in (refused.value.fix or "")


def test_what_a_stratum_is_depends_on_its_rows_and_its_value():
    def told(rows, weights):
        return identity(data.stratified(data.rows(rows, batch=4), by="level", weights=weights))

    assert told(LEVELS, {"a": 1, "b": 1}) == told(list(LEVELS), {"a": 1, "b": 1})
    assert told(LEVELS, {"a": 1, "b": 1}) != told(LEVELS[:-1], {"a": 1, "b": 1})
    assert told(LEVELS, {"a": 1})["a.rows"] != told(LEVELS, {"b": 1})["b.rows"]


def test_what_has_no_strata_is_said():
    with pytest.raises(DataError, match="no column 'levle'") as refused:
        data.stratified(data.rows(LEVELS, batch=4), by="levle")
    assert refused.value.fix == "Write by='level'."
    with pytest.raises(DataError, match="without end"):
        data.stratified(numbered("a"), by="prompt")
    empty = data.stratified(data.rows(LEVELS, batch=4), by="level", weights={"a": 1, "z": 1})
    with pytest.raises(DataError, match="where level is z has no rows"):
        empty.cursor().draw()


# -- a curriculum ------------------------------------------------------------------------------------------------------


@pytest.fixture
def curriculum():
    """The worker of the page on data."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    [lines] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "class Curriculum" in block]
    names = {"fl": fl}
    exec(lines, names)
    return fl.open(names["Curriculum"](keep=0.5))


def test_a_curriculum_leaves_what_is_known_and_what_is_hopeless(curriculum):
    rows = [{"prompt": f"p{i}", "level": level} for i, level in enumerate("abc" * 20)]
    source = data.stratified(data.rows(rows, batch=12), by="level")
    cursor, rewards = source.cursor(), {"a": 1.0, "b": 0.5, "c": 0.0}
    chosen = []
    for step in range(4):
        batch = source.to_batch(cursor.draw(), 12 * step, make_tokenizer())
        batch = curriculum.choose(batch, rows=12 if step == 0 else 4)
        chosen.append(Counter(batch.level.to_list()))
        batch = batch.with_columns({"rewards": fl.Column.of([rewards[level] for level in batch.level])})
        curriculum.learn(batch)
    # after 4 rows of each, a is at 1 - 2^-5, c at 2^-5, and b at 0.5
    assert chosen == [Counter(a=4, b=4, c=4), *[Counter(b=4)] * 3]
    assert curriculum.rates == {"a": 1 - 2**-5, "b": 0.5, "c": 2**-5}
