"""Mixtures of sources: shares, order, where they go on, and what cannot be mixed."""

import json
import runpy
import shutil
from collections import Counter
from pathlib import Path

import pytest
from byte_tokenizer import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import data, rl
from flowrl.errors import DataError


def numbered(name, n=None, **options):
    """Prompts ``math0``, ``math1``, ...: n of them, or without end."""
    return data.generated(lambda i: {"prompt": f"{name}{i}", "answer": i}, size=n, **{"batch": 99, **options})


def mixture(batch=8, seed=0, **parts):
    """``math=3`` is a source of prompts ``math0``, ... of weight 3."""
    sources = {name: numbered(name) for name in parts}
    return data.mix(sources, weights=parts, batch=batch, seed=seed)


def texts(source, cursor, n=None):
    rows = cursor.draw(n)
    return source.to_batch(rows, 0, make_tokenizer()).prompt.to_list() if rows else []


def test_rows_come_in_the_shares_of_the_weights_and_say_their_source():
    mix = mixture(batch=3000, math=6, code=3, chat=1)
    batch = mix.to_batch(mix.cursor().draw(), 40, make_tokenizer())
    assert batch.keys == tuple((40 + i,) for i in range(3000))
    assert all(p.startswith(s) for p, s in zip(batch.prompt, batch.source, strict=True))
    counts = Counter(batch.source)
    assert {name: round(count / 3000, 1) for name, count in counts.items()} == {"math": 0.6, "code": 0.3, "chat": 0.1}
    for name, count in counts.items():  # each goes on in its own order
        assert [p for p in batch.prompt if p.startswith(name)] == [f"{name}{i}" for i in range(count)]
    assert batch.prompt_ids.to_list() == [make_tokenizer()(p)["input_ids"] for p in batch.prompt]


def test_without_weights_all_are_drawn_alike():
    mix = data.mix({"a": numbered("a"), "b": numbered("b")}, batch=2000)
    assert abs(Counter(name for name, _ in mix.cursor().draw())["a"] - 1000) < 80


def test_a_draw_depends_on_the_seed_and_its_number_alone():
    first, again, other = (mixture(math=1, code=1, seed=s) for s in (0, 0, 1))
    whole = texts(first, first.cursor(), 60)
    cursor = again.cursor()
    assert [t for n in (7, 1, 30, 22) for t in texts(again, cursor, n)] == whole
    assert texts(other, other.cursor(), 60) != whole
    picked = [mixture(math=2, code=1, chat=1).pick(i) for i in range(8)]
    assert picked == ["code", "chat", "math", "math", "math", "math", "math", "chat"], "the same over releases"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.booleans(), st.sampled_from([2, 7, None])
)
def test_any_draws_resume_exactly(sizes, cut, repeat, size):
    def make():
        parts = {"a": numbered("a", size, repeat=repeat, seed=3), "b": numbered("b"), "c": numbered("c", 5)}
        return data.mix(parts, weights={"a": 2, "b": 1, "c": 1}, batch=4)

    mix = make()
    cursor = mix.cursor()
    drawn, states = [], [cursor.state()]
    for n in sizes:
        drawn.append([(name, dict(row)) for name, row in cursor.draw(n)])
        states.append(cursor.state())
    at = min(cut, len(sizes))
    again = make().cursor()
    again.load_state(json.loads(json.dumps(states[at])))
    assert [[(name, dict(row)) for name, row in again.draw(n)] for n in sizes[at:]] == drawn[at:]


def test_a_mixture_ends_with_the_first_part_that_ends():
    parts = {"a": numbered("a", 5, repeat=False, shuffle=False), "b": numbered("b")}
    mix = data.mix(parts, weights={"a": 1, "b": 3}, batch=6)
    cursor, drawn = mix.cursor(), []
    while rows := texts(mix, cursor):
        drawn += rows
    assert [p for p in drawn if p.startswith("a")] == [f"a{i}" for i in range(5)]
    b = [p for p in drawn if p.startswith("b")]
    assert b == [f"b{i}" for i in range(len(b))]
    assert mix.pick(len(drawn)) == "a", "the row that is not there is one of a's"
    assert cursor.draw() == [] and cursor.draw(3) == []


def test_mixtures_are_sources_of_mixtures():
    inner = data.mix({"a": numbered("a"), "b": numbered("b")}, batch=1, column="inner")
    with pytest.raises(DataError, match=r"The source 'c' of a mixture has no column 'inner', which 'ab' has\."):
        data.mix({"ab": inner, "c": numbered("c")}, batch=1).schema()
    other = data.mix({"c": numbered("c"), "d": numbered("d")}, batch=1, column="inner")
    mix = data.mix({"ab": inner, "cd": other}, batch=20)
    batch = mix.to_batch(mix.cursor().draw(), 0, make_tokenizer())
    assert all(i in s for i, s in zip(batch.inner, batch.source, strict=True))
    assert all(p.startswith(i) for p, i in zip(batch.prompt, batch.inner, strict=True))


def test_preferences_keep_their_pairs():
    def pairs(name):
        row = {"prompt": name, "good": "1", "bad": "2"}
        return data.rows([row] * 3, batch=1, response="good", rejected="bad")

    mix = data.mix({"x": pairs("x"), "y": pairs("y")}, batch=4)
    batch = mix.to_batch(mix.cursor().draw(), 5, make_tokenizer())
    assert batch.keys == tuple((5 + i, j) for i in range(4) for j in range(2))
    assert batch.preferred.to_list() == [True, False] * 4
    assert [batch.source[2 * i] == batch.source[2 * i + 1] == batch.prompt[2 * i] for i in range(4)] == [True] * 4


def test_a_part_may_lose_all_its_prompts_of_a_step_and_not_the_whole_step():
    short, long = (data.rows([{"prompt": "p" * n}], batch=1, max_prompt_tokens=5, overlong="drop") for n in (2, 9))
    mix = data.mix({"short": short, "long": long}, batch=8)
    batch = mix.to_batch(mix.cursor().draw(), 0, make_tokenizer())
    assert set(batch.source) == {"short"} and 0 < len(batch) < 8 and mix.dropped == 8 - len(batch)
    mix = data.mix({"long": long}, batch=3)
    with pytest.raises(DataError, match="All 3 prompts of a step are longer than max_prompt_tokens"):
        mix.to_batch(mix.cursor().draw(), 0, make_tokenizer())


ROWS = [{"prompt": "1", "answer": "2", "level": 3}]


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: data.mix({}, batch=1), "A mixture is made of sources by name.", "Write fl.data.mix("),
        (lambda: data.mix({numbered("a"): 1}, batch=1), "A mixture is made of sources by name.", "Write fl.data.mix("),
        (lambda: data.mix([numbered("a")], batch=1), "A mixture is made of sources by name.", "Write fl.data.mix("),
        (
            lambda: data.mix({"a": numbered("a")}, weights=[1], batch=1),
            "weights= takes a weight by name, not [1].",
            "Write fl.data.mix(",
        ),
        (lambda: data.mix({"a": ROWS}, batch=1), "A mixture is made of sources by name.", "Write fl.data.mix("),
        (
            lambda: data.mix({"a": numbered("a")}, batch=0),
            "A mixture: batch=0 is not a whole number of at least 1.",
            "Give batch=, the rows",
        ),
        (
            lambda: data.mix({"math": numbered("a")}, weights={"mth": 1}, batch=1),
            "weights= names 'mth', which is no source of this mixture.",
            "Did you mean 'math'?",
        ),
        (
            lambda: data.mix({"a": numbered("a"), "b": numbered("b")}, weights={"a": 1}, batch=1),
            "weights= gives none to 'b'.",
            "Give every source one.",
        ),
        *(
            (
                lambda weight=weight: data.mix({"a": numbered("a")}, weights={"a": weight}, batch=1),
                f"The weight of 'a' is {weight!r}.",
                "Give a number above 0;",
            )
            for weight in (0, -1, float("nan"), float("inf"), "3", True, None)
        ),
        (
            lambda: data.mix(
                {"a": numbered("a", tokenizer="x"), "b": numbered("b")},
                batch=1,
            ),
            "The sources 'a' and 'b' of a mixture have different tokenizers.",
            "Give both the same tokenizer=",
        ),
    ],
)
def test_what_is_no_mixture_is_refused_at_its_line(make, what, fix):
    with pytest.raises(DataError) as caught:
        make()
    assert caught.value.what == what and caught.value.fix.startswith(fix)
    assert caught.value.at.file == __file__


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (
            {"columns": ["answer"]},
            "The source 'b' of a mixture has no column 'level', which 'a' has.",
            "Add it to 'b', ",
        ),
        ({"columns": ["answer", "level"], "prompt": "level"}, None, None),
        (
            {"response": "answer"},
            "The source 'a' of a mixture has no column 'response_ids', which 'b' has.",
            "Give 'a' response= too.",
        ),
        ({"chat": True}, None, None),
    ],
)
def test_sources_with_other_columns_are_named(options, what, fix):
    if options.get("prompt") == "level":
        what = "The source 'b' of a mixture has no column 'level', which 'a' has."
        fix = "Add it to 'b', or leave it out of 'a' with columns=[...]."
    mix = data.mix({"a": data.rows(ROWS, batch=1), "b": data.rows(ROWS, batch=1, **options)}, batch=1)
    if what is None:
        assert list(mix.schema()) == ["prompt", "prompt_ids", "answer", "level", "source"]
        return
    with pytest.raises(DataError) as caught:
        mix.schema()
    assert caught.value.what == what and caught.value.fix.startswith(fix) and caught.value.at.file == __file__


def test_columns_that_are_nearly_alike():
    other = data.rows([{"prompt": "1", "answers": "2", "level": 3}], batch=1)
    with pytest.raises(DataError) as caught:
        data.mix({"a": data.rows(ROWS, batch=1), "b": other}, batch=1).schema()
    assert caught.value.fix == "Call 'answers' of 'b' 'answer' too."


def test_text_and_messages_are_not_mixed():
    chats = data.rows([{"prompt": [{"role": "user", "content": "1"}], "answer": "2", "level": 3}], batch=1)
    with pytest.raises(DataError, match="has no column 'messages', which 'b' has") as caught:
        data.mix({"a": data.rows(ROWS, batch=1), "b": chats}, batch=1).schema()
    assert caught.value.fix == "Give both prompts of one kind: text, or lists of messages."


def test_a_column_named_source_is_not_overwritten():
    rows = data.rows([{"prompt": "1", "source": "here"}], batch=1)
    with pytest.raises(DataError, match="have a column 'source', and it adds one that says the source"):
        data.mix({"a": rows}, batch=1).schema()
    mix = data.mix({"a": rows}, batch=1, column="drawn_from")
    batch = mix.to_batch(mix.cursor().draw(), 0, make_tokenizer())
    assert (batch.source[0], batch.drawn_from[0]) == ("here", "a")


def test_another_mixture_is_not_resumed():
    state = mixture(math=3, code=1).cursor().state()
    with pytest.raises(DataError, match="and now it is one of") as caught:
        mixture(math=1, code=1).cursor().load_state(state)
    assert caught.value.fix == "Resume with the mixture that the run began with."


def test_a_program_trains_on_a_mixture_and_goes_on_in_it(tmp_path):
    task = runpy.run_path(str(Path(__file__).parents[2] / "algorithms" / "tasks" / "arithmetic.py"))
    flow = fl.Flow("sft")
    actor = flow.worker(fl.Actor, task["MODEL"], name="actor", lr=1e-3)

    @fl.op(reads="source", adds="is_easy: f32[]", cost="local")
    def easy(batch):
        return {"is_easy": [float(s == "easy") for s in batch.source]}

    @flow.program
    def sft(steps: int = 4):
        parts = {"easy": task["examples"](1, one_digit=1.0), "hard": task["examples"](1, one_digit=0.0)}
        for step, batch in flow.steps(data.mix(parts, weights={"easy": 1, "hard": 3}, batch=8), steps):
            batch = easy(batch)
            flow.log(step, actor.update(batch, loss=rl.sft()), easy=batch.is_easy.mean())

    assert not flow.check().errors
    whole = flow.run(out=tmp_path / "whole", quiet=True)
    cut = tmp_path / "cut"
    flow.run(out=cut, quiet=True, checkpoint_every=2)
    newest = max((cut / "checkpoints").iterdir())
    shutil.rmtree(newest)  # as if the run had died before it
    flow.run(out=cut, quiet=True, checkpoint_every=2, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < sum(line["easy"] for line in lines) < 2
    again = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert whole.status == "done" and [x["loss"] for x in again] == [x["loss"] for x in lines]
