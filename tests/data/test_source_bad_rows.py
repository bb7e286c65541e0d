"""Rows that cannot be read: an error for each kind, or ``on_bad="skip"``, which leaves them out and counts them."""

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import CHAT, TEMPLATE, make_tokenizer

from flowrl import data
from flowrl.errors import DataError

GOOD = '{"prompt": "fine", "answer": "yes"}'


def lines_of(tmp_path, *bad, good=3):
    """A file of good lines with bad ones between them."""
    path = tmp_path / "rows.jsonl"
    lines = [GOOD.encode()] * good
    for place, line in enumerate(bad):
        lines.insert(1 + 2 * place, line if isinstance(line, bytes) else line.encode())
    path.write_bytes(b"\n".join(lines))
    return path


BAD = {
    "no JSON": ('{"prompt": ', {}, "A line is no JSON"),
    "no object": ("[1, 2]", {}, "A row is list, not an object"),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', {}, "A row holds a text that is no UTF-8"),
    "a zero byte": ("\x00", {}, "A line is no JSON"),
    "too deep": ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", {}, "too deep"),
    "a huge number": ('{"prompt": ' + "9" * 10_000 + "}", {}, "A line is no JSON"),
    "no prompt": ('{"answer": "yes"}', {}, "The prompt 'prompt' of a row is missing"),
    "an empty prompt": ('{"prompt": ""}', {}, "is empty"),
    "a number": ('{"prompt": 7}', {}, "is 7"),
    "a list of text": ('{"prompt": ["a"]}', {}, "lacks 'role'"),
    "half of a pair": ('{"prompt": "\\ud800"}', {}, "half of a surrogate pair"),
    "no response": ('{"prompt": "a"}', {"response": "answer"}, "The response 'answer' of a row is None"),
    "no text": ('{"prompt": "a", "answer": 3}', {"response": "answer"}, "is 3, not text"),
    "no column": ('{"prompt": "a"}', {"columns": ["answer"]}, "A row has no column 'answer', which columns= names."),
    "no role": ('{"prompt": [{"content": "x"}]}', {"chat": True}, "lacks 'role'"),
    "no message": ('{"prompt": ["x"]}', {"chat": True}, "lacks 'role'"),
    "another role": ('{"prompt": [{"role": "robot", "content": "x"}]}', {"chat": True}, "no role robot"),
    "no answer": ('{"talk": [{"role": "user", "content": "x"}]}', {"messages": "talk"}, "no message of the assistant"),
    "too long": (json.dumps({"prompt": "a" * 50}), {"max_prompt_tokens": 20}, "A prompt has 51 tokens"),
    "no document": ('{"prompt": 3}', {"text": "prompt", "length": 8}, "The document 'prompt' of a row is 3"),
}


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_is_an_error_that_names_its_line_or_is_skipped(kind, tmp_path, caplog):
    line, options, says = BAD[kind]
    path, words = lines_of(tmp_path, line), make_tokenizer(TEMPLATE)
    if options.get("messages"):
        talk = json.dumps({"talk": [*CHAT, {"role": "assistant", "content": "yes"}]})
        path.write_text(f"{talk}\n{line}\n{talk}\n{talk}")
    with pytest.raises(DataError) as error:
        source = data.jsonl(path, batch=4, shuffle=False, **options)
        source.to_batch(source.cursor().draw(), 0, words)
    said = error.value.report()
    assert says in said and "rows.jsonl:2" in said and error.value.fix, said
    source = data.jsonl(path, batch=4, shuffle=False, on_bad="skip", **options)
    source.schema()
    with caplog.at_level(logging.WARNING, "flowrl.data"):
        batch = source.to_batch(source.cursor().draw(), 10, words)
    assert source.skipped == 1 and source.dropped == 0
    assert {key[0] for key in batch.keys} <= {10, 12, 13} and len(batch) >= 3
    assert says in caplog.text and "rows.jsonl:2" in caplog.text


def test_bad_rows_are_counted_in_every_epoch_and_told_of_once(tmp_path, caplog):
    source = data.jsonl(lines_of(tmp_path, "{", "{"), batch=5, on_bad="skip")
    cursor = source.cursor()
    for epoch in range(3):
        batch = source.to_batch(cursor.draw(), 5 * epoch, make_tokenizer())
        assert len(batch) == 3 and source.skipped == 2 * (epoch + 1)
    assert caplog.text.count("skipped a row") == 2


def test_only_the_first_twenty_are_told_of(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD] + ["{"] * 50))
    source = data.jsonl(path, batch=51, on_bad="skip")
    assert len(source.to_batch(source.cursor().draw(), 0, make_tokenizer())) == 1
    assert source.skipped == 50 and caplog.text.count("skipped a row") == 20 and "counted only" in caplog.text


def test_where_no_row_of_a_step_is_left_the_first_error_is_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n" + "{\n" * 3)
    source = data.jsonl(path, batch=2, shuffle=False, on_bad="skip")
    cursor = source.cursor()
    assert len(source.to_batch(cursor.draw(), 0, make_tokenizer())) == 1
    with pytest.raises(DataError, match="A line is no JSON"):
        source.to_batch(cursor.draw(), 2, make_tokenizer())
    path.write_text("{\n{")
    with pytest.raises(DataError, match="A line is no JSON"):
        data.jsonl(path, batch=2, on_bad="skip").schema()


def test_what_is_wrong_with_all_rows_is_no_bad_row():
    source = data.rows([{"prompt": CHAT}] * 3, batch=3, on_bad="skip")
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        source.to_batch(source.cursor().draw(), 0, make_tokenizer())
    assert source.skipped == 0


@pytest.mark.parametrize("kind", ["rows", "generated", "parquet", "hf"])
def test_every_kind_of_source_skips(kind, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": None}, {"prompt": "b"}, {"prompt": ""}]
    if kind in ("rows", "generated"):
        rows[1] = "no object"
    if kind == "rows":
        source = data.rows(rows, batch=4, on_bad="skip")
    elif kind == "generated":
        source = data.generated(lambda i: rows[i], size=4, batch=4, on_bad="skip")
    else:
        import datasets

        whole = datasets.Dataset.from_list(rows)
        whole.to_parquet(tmp_path / "rows.parquet")
        source = data.hf(whole, batch=4, on_bad="skip")
        if kind == "parquet":
            source = data.parquet(tmp_path / "rows.parquet", batch=4, on_bad="skip")
    batch = source.to_batch(source.cursor().draw(), 0, make_tokenizer())
    assert sorted(batch.prompt.to_list()) == ["a", "b"] and source.skipped == 2


def test_a_mixture_counts_those_of_its_parts(tmp_path):
    one = data.jsonl(lines_of(tmp_path, "{"), batch=1, on_bad="skip")
    two = data.rows([{"prompt": "x", "answer": "y"}], batch=1)
    mixed = data.mix({"one": one, "two": two}, batch=8, exact=True)
    batch = mixed.to_batch(mixed.cursor().draw(), 0, make_tokenizer())
    assert len(batch) == 7 and mixed.skipped == one.skipped == 1 and two.skipped == 0


def test_a_part_of_a_mixture_may_have_bad_rows_alone_in_a_step(tmp_path, caplog):
    """Also where it is a part of a part; where no part has a row the first error is told, and nothing is skipped."""
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n" + f"{GOOD}\n")
    math = data.rows([{"prompt": "x", "answer": "y"}], batch=1)
    code = data.jsonl(path, batch=1, shuffle=False, on_bad="skip")
    for part in (code, data.mix({"code": code}, batch=1, column=None)):
        mixed = data.mix({"math": math, "code": part}, weights={"math": 7, "code": 1}, batch=8, exact=True)
        cursor, before = mixed.cursor(), code.skipped
        assert len(mixed.to_batch(cursor.draw(), 0, make_tokenizer())) == 7 and mixed.skipped == before + 1
        assert mixed.to_batch(cursor.draw(), 8, make_tokenizer()).source.to_list().count("code") == 1
    assert caplog.text.count("A line is no JSON") == 1
    alone = data.mix({"code": data.jsonl(path, batch=1, shuffle=False, on_bad="skip")}, batch=1)
    with pytest.raises(DataError, match="A line is no JSON") as error:
        alone.to_batch(alone.cursor().draw(), 0, make_tokenizer())
    assert "rows.jsonl:1" in str(error.value) and alone.skipped == 0


@pytest.mark.parametrize("kind", ["jsonl", "rows"])
def test_rows_that_cannot_be_read_are_in_no_stratum(kind, tmp_path, caplog):
    good, path = [json.loads(GOOD) | {"level": level} for level in "aabb"], tmp_path / "rows.jsonl"
    path.write_text("\n".join(["{", *map(json.dumps, good), '{"prompt": 7, "level": "b"}']))
    source = data.jsonl(path, batch=99, on_bad="skip")
    if kind == "rows":
        source = data.rows(["no object", *good, {"prompt": 7, "level": "b"}], batch=99, on_bad="skip")
    strata = data.stratified(source, by="level", weights={"a": 1, "b": 1} if kind == "jsonl" else None, batch=10)
    batch = strata.to_batch(strata.cursor().draw(), 0, make_tokenizer())
    assert batch.level.to_list().count("a") == 5 and strata.skipped == 10 - len(batch) in (1, 2)
    assert caplog.text.count("1 rows of") == 1 and "are in no stratum" in caplog.text


def test_preferences_and_long_prompts_beside_bad_rows():
    rows = [{"prompt": "a" * n, "good": "x", "worse": "y" if n != 3 else None} for n in (1, 3, 40, 2)]
    how = {"response": "good", "rejected": "worse", "max_prompt_tokens": 20, "overlong": "drop", "on_bad": "skip"}
    source = data.rows(rows, batch=4, shuffle=False, **how)
    batch = source.to_batch(source.cursor().draw(), 0, make_tokenizer())
    assert batch.keys == ((0, 0), (0, 1), (3, 0), (3, 1)) and (source.skipped, source.dropped) == (1, 1)


def test_odd_rows_that_are_fine(tmp_path):
    odd = ['{"prompt": "a", "answer": NaN}', '{"prompt": "a", "answer": [1, {"x": null}]}', '{"prompt": "a"}']
    huge = json.dumps({"prompt": "b" * 1_000_000, "answer": "x"})
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, *odd, huge]))
    source = data.jsonl(path, batch=5, shuffle=False, max_prompt_tokens=32, overlong="truncate")
    batch = source.to_batch(source.cursor().draw(), 0, make_tokenizer())
    assert batch.answer.to_list()[2:] == [[1, {"x": None}], None, "x"] and len(batch.prompt_ids[4]) == 32


def test_a_wrong_word_is_told():
    with pytest.raises(DataError, match="on_bad"):
        data.rows([{"prompt": "a"}], batch=1, on_bad="ignore")


def test_a_run_says_how_many_rows_of_a_step_it_has_skipped(tmp_path):
    import flowrl as fl

    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, "{", GOOD, GOOD, GOOD, '{"prompt": 3}']))
    flow = fl.Flow("skips")

    class Counts(fl.Worker):
        @fl.op(reads="prompt: any")
        def count(self, batch) -> fl.Metrics:
            return fl.Metrics(rows=len(batch))

    counts = flow.worker(Counts, name="counts")

    @flow.program
    def train(steps: int = 3):
        rows = fl.data.jsonl(path, batch=2, shuffle=False, on_bad="skip", tokenizer=make_tokenizer)
        for step, batch in flow.steps(rows, steps):
            flow.log(step, counts.count(batch))

    flow.run(out=tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["rows"], line.get("rows_skipped")) for line in lines] == [(1, 1), (2, None), (1, 1)]


def test_a_parquet_file_that_is_read_as_lines_is_told(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path)
    with pytest.raises(DataError, match="is parquet, and no lines of JSON") as error:
        data.jsonl(path, batch=1).cursor().draw()
    assert error.value.fix == "Read it with fl.data.parquet."
