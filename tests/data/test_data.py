"""Sources: what they read, in which order, where they go on, and what they say when the data is not as asked."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import CHAT, TEMPLATE, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import data
from flowrl.data.source import shuffled
from flowrl.errors import DataError

quick = settings(max_examples=50, deadline=None)


def numbered(n):
    return [{"prompt": f"p{i}", "answer": i} for i in range(n)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows, group=3):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def save_hf(path, rows, split=None):
    import datasets

    data_set = datasets.Dataset.from_list(rows)
    (data_set if split is None else datasets.DatasetDict({split: data_set})).save_to_disk(str(path))
    return path


@pytest.fixture(
    params=["rows", "function", "generator", "jsonl", "two files", "parquet", "hf", "hf splits", "generated"]
)
def every(request, tmp_path):
    """Every kind of source over the rows p0 ... p9: a function that makes one with the given options."""
    content = numbered(10)

    def make(**options):
        match request.param:
            case "rows":
                return data.rows(content, **options)
            case "function":
                return data.rows(lambda: content, **options)
            case "generator":
                return data.rows(lambda: iter(content), **options)
            case "jsonl":
                return data.jsonl(write_jsonl(tmp_path / "a.jsonl", content), **options)
            case "two files":
                write_jsonl(tmp_path / "b1.jsonl", content[:4])
                write_jsonl(tmp_path / "b2.jsonl", content[4:])
                return data.jsonl(str(tmp_path / "b*.jsonl"), **options)
            case "parquet":
                return data.parquet(write_parquet(tmp_path / "a.parquet", content), **options)
            case "hf":
                return data.hf(save_hf(tmp_path / "hf", content), **options)
            case "hf splits":
                return data.hf(save_hf(tmp_path / "hfs", content, "test"), split="test", **options)
            case "generated":
                return data.generated(lambda i: content[i], size=10, **options)

    return make


def prompts(rows):
    return [row["prompt"] for row in rows]


# Every kind of source


def test_schema_and_rows(every, tokenizer):
    source = every(batch=4, shuffle=False)
    assert {name: str(type_) for name, type_ in source.schema().items()} == {
        "prompt": "any",
        "prompt_ids": "i32[*prompt]",
        "answer": "any",
    }
    rows = source.cursor().draw()
    batch = source.to_batch(rows, 7, tokenizer)
    assert batch.keys == ((7,), (8,), (9,), (10,))
    assert set(batch.fields) == set(source.schema())
    assert {name: batch[name].type for name in batch.fields} == {n: str(t) for n, t in source.schema().items()}
    assert batch.prompt.to_list() == ["p0", "p1", "p2", "p3"]
    assert batch.answer.to_list() == [0, 1, 2, 3]
    assert batch.prompt_ids.to_list() == [tokenizer.encode(f"p{i}") for i in range(4)]
    assert batch.prompt_ids.to_list()[0][0] == tokenizer.bos_token_id


def test_an_epoch_has_every_row_once_and_the_next_another_order(every):
    cursor = every(batch=4, seed=3).cursor()
    drawn = [row for _ in range(5) for row in prompts(cursor.draw())]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [f"p{i}" for i in range(10)]
    assert drawn[:10] != drawn[10:] != [f"p{i}" for i in range(10)]


def test_order_depends_on_seed_only(every):
    import random

    random.seed(1)
    one = prompts(every(batch=10, seed=5).cursor().draw())
    random.seed(2)
    assert prompts(every(batch=10, seed=5).cursor().draw()) == one
    assert prompts(every(batch=10, seed=6).cursor().draw()) != one


def test_all_kinds_have_the_same_order(every):
    assert prompts(every(batch=10, seed=0).cursor().draw()) == [f"p{i}" for i in shuffled(10, 0, 0)]


def test_orders_stay_the_same_over_releases():
    assert list(shuffled(10, 0, 0)) == [9, 1, 0, 2, 7, 3, 5, 8, 6, 4], "another order would break every resumed run"


def test_without_repeat_the_last_draw_is_short_and_then_there_is_none(every):
    cursor = every(batch=4, repeat=False, shuffle=False).cursor()
    assert [len(cursor.draw()) for _ in range(5)] == [4, 4, 2, 0, 0]


def test_a_cursor_goes_on_where_its_state_was_taken(every):
    source = every(batch=3, seed=1)
    cursor = source.cursor()
    expected = [prompts(cursor.draw()) for _ in range(9)]
    cursor = source.cursor()
    for step in range(9):
        state = json.loads(json.dumps(cursor.state()))
        assert prompts(cursor.draw()) == expected[step]
        other = every(batch=3, seed=1).cursor()
        other.load_state(state)
        assert [prompts(other.draw()) for _ in range(9 - step)] == expected[step:]


def test_draws_of_other_sizes(every):
    whole = prompts(every(batch=1, seed=1).cursor().draw(25))
    cursor = every(batch=4, seed=1).cursor()
    parts = prompts(cursor.draw()) + prompts(cursor.draw(9)) + prompts(cursor.draw(0)) + prompts(cursor.draw(12))
    assert parts == whole
    assert cursor.state() == {"epoch": 2, "index": 5, "rows": 10}


@quick
@given(n=st.integers(1, 12), sizes=st.lists(st.integers(0, 7), max_size=8), cut=st.integers(0, 8), repeat=st.booleans())
def test_any_draws_resume_exactly(n, sizes, cut, repeat):
    source = data.rows(numbered(n), batch=1, seed=n, repeat=repeat)
    whole = prompts(source.cursor().draw(sum(sizes)))
    cursor, drawn = source.cursor(), []
    for i, size in enumerate(sizes):
        if i == cut:
            state, cursor = cursor.state(), source.cursor()
            cursor.load_state(state)
        drawn += prompts(cursor.draw(size))
    assert drawn == whole
    assert len(whole) == (sum(sizes) if repeat else min(n, sum(sizes)))


@quick
@given(st.integers(1, 300), st.integers(), st.integers(0, 5))
def test_shuffled_is_a_permutation(size, seed, epoch):
    assert sorted(shuffled(size, seed, epoch)) == list(range(size))


def test_generated_without_end():
    source = data.generated(lambda i: {"prompt": f"{i}"}, batch=3)
    cursor = source.cursor()
    assert prompts(cursor.draw()) + prompts(cursor.draw()) == ["0", "1", "2", "3", "4", "5"]
    assert cursor.state() == {"epoch": 0, "index": 6, "rows": None}
    other = source.cursor()
    other.load_state(cursor.state())
    assert prompts(other.draw()) == ["6", "7", "8"]


def test_data_that_has_changed_is_not_resumed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(5))
    cursor = data.jsonl(path, batch=2).cursor()
    cursor.draw()
    write_jsonl(path, numbered(6))
    other = data.jsonl(path, batch=2).cursor()
    other.load_state(cursor.state())
    with pytest.raises(DataError, match="5 rows, and now there are 6"):
        other.draw()


# Files


def test_jsonl_reads_lines_as_they_are(tmp_path, tokenizer):
    path = tmp_path / "odd.jsonl"
    path.write_bytes('\ufeff{"prompt": "ä"}\n\n  \r\n{"prompt": "b"}\r\n{"prompt": "c"}'.encode())
    source = data.jsonl(path, batch=3, shuffle=False)
    assert prompts(source.cursor().draw()) == ["ä", "b", "c"]
    assert tokenizer.decode(source.to_batch(source.cursor().draw(), 0, tokenizer).prompt_ids[0][1:]) == "ä"


def test_columns_are_those_of_the_first_rows(tmp_path, tokenizer):
    rows = [{"prompt": "a"}, {"prompt": "b", "level": 3}, {"prompt": "c", "level": None}]
    rows += [{"prompt": "x"} for _ in range(40)] + [{"prompt": "y", "late": 1}]
    source = data.jsonl(write_jsonl(tmp_path / "a.jsonl", rows), batch=len(rows), shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer)
    assert set(batch.fields) == {"prompt", "prompt_ids", "level"}
    assert batch.level.to_list()[:4] == [None, 3, None, None]


def test_parquet_decodes_only_what_is_drawn_from(tmp_path, monkeypatch):
    from flowrl.data import file_stores

    source = data.parquet(write_parquet(tmp_path / "a.parquet", numbered(12)), batch=3, shuffle=False)
    cursor = source.cursor()
    assert prompts(cursor.draw()) == ["p0", "p1", "p2"]
    store = source.open_store()
    assert isinstance(store, file_stores.Parquet) and list(store._decoded) == [(0, 0)]
    monkeypatch.setattr(file_stores, "_CACHE", 0)
    assert prompts(cursor.draw(9)) == [f"p{i}" for i in range(3, 12)]
    assert source.open_store() is store and list(store._decoded) == [(0, 3)]


def test_hf_reads_a_folder_of_files(tmp_path, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "files"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", numbered(3))
    source = data.hf(folder, batch=3, shuffle=False)
    assert list(source.schema()) == ["prompt", "prompt_ids", "answer"]
    assert prompts(source.cursor().draw()) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_messages_in_files(tmp_path, kind):
    rows = [{"prompt": CHAT}, {"prompt": [*CHAT, {"role": "assistant", "content": "yes"}]}]
    source = {
        "jsonl": lambda: data.jsonl(write_jsonl(tmp_path / "a.jsonl", rows), batch=2, shuffle=False),
        "parquet": lambda: data.parquet(write_parquet(tmp_path / "a.parquet", rows), batch=2, shuffle=False),
        "hf": lambda: data.hf(save_hf(tmp_path / "hf", rows), batch=2, shuffle=False),
    }[kind]()
    assert "messages" in source.schema()
    batch = source.to_batch(source.cursor().draw(), 0, make_tokenizer(TEMPLATE))
    assert batch.prompt.to_list() == ["[user]hi[assistant]", "[user]hi[assistant]yes[assistant]"]


# What goes wrong


def report(make):
    with pytest.raises(DataError) as caught:
        make()
    error = caught.value
    assert error.at is not None, error.report()
    assert error.fix, error.report()
    return error.report()


def make_batch(source, tokenizer):
    return source.to_batch(source.cursor().draw(), 0, tokenizer)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch=0"),
        ({}, "no batch="),
        ({"batch": 1, "promt": "x"}, "no option 'promt'"),
        ({"batch": 1, "overlong": "trunc"}, 'Write overlong="truncate"'),
        ({"batch": 1, "max_prompt_tokens": 0}, "max_prompt_tokens=0 is not a whole number of at least 1, or None"),
        ({"batch": True}, "Give batch="),
        ({"batch": "16"}, "Write batch=16."),
        ({"batch": 1, "prompt": 3}, "prompt=3 is not text"),
        ({"batch": 1, "chat": "yes"}, "chat='yes' is not True or False"),
        ({"batch": 1, "seed": 0.5}, "seed=0.5 is not a whole number"),
        ({"batch": 1, "columns": "answer"}, "Write columns=['answer']"),
    ],
)
def test_wrong_options(options, says):
    said = report(lambda: data.rows([{"prompt": "a"}], **options))
    assert says in said and "test_data.py" in said


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ([{"promt": "a"}], {}, "no column 'prompt', which is its prompt"),
        ([{"promt": "a"}], {}, "Write prompt='promt'"),
        ([{"prompt": "a", "answr": "b"}], {"response": "answer"}, "Write response='answr'"),
        ([{"prompt": "a", "level": 1}], {"columns": ["levle"]}, "Did you mean 'level'"),
        ([{"prompt": "a", "tokens": 1}], {"response": "prompt"}, "'tokens' has the name of a field"),
        ([{"q": "a", "prompt": "b"}], {"prompt": "q"}, "leave it out with columns=[]"),
        ([{"prompt": "a"}], {"system": "x"}, "Add chat=True"),
        ([], {}, "has no rows"),
        (["a"], {}, "not an object"),
    ],
)
def test_wrong_columns(content, options, says):
    said = report(lambda: data.rows(content, batch=1, **options).schema())
    assert says in said


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"prompt": ""}, {}, "is empty"),
        ({"prompt": None}, {}, "is missing"),
        ({"other": "a"}, {}, "is missing"),
        ({"prompt": 7}, {}, "is 7"),
        ({"prompt": "a", "answer": 3}, {"response": "answer"}, "is 3, not text"),
        ({"prompt": "a", "answer": b"raw"}, {}, "'answer' holds bytes"),
        ({"prompt": [{"content": "x"}]}, {"chat": True}, "lacks 'role'"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, {"chat": True}, "template refuses these messages: no role"),
    ],
)
def test_wrong_rows_are_named(row, options, says):
    content = [{"prompt": "fine", "answer": "yes"}, row]
    source = data.rows(content, batch=2, shuffle=False, **options)
    said = report(lambda: make_batch(source, make_tokenizer(TEMPLATE)))
    assert says in said and "row 1" in said


def test_a_late_list_among_texts(tokenizer):
    source = data.rows([*numbered(40), {"prompt": CHAT}], batch=41)
    said = report(lambda: make_batch(source, tokenizer))
    assert "row 40" in said and "Add chat=True" in said


def test_wrong_tokenizers(tokenizer):
    rows = [{"prompt": "a", "answer": "b"}]
    assert "no chat template" in report(lambda: make_batch(data.rows(rows, batch=1, chat=True), tokenizer))
    assert "no tokenizer" in report(lambda: make_batch(data.rows(rows, batch=1), None))
    endless = data.rows(rows, batch=1, response="answer")
    assert "no end-of-sequence" in report(lambda: make_batch(endless, make_tokenizer(eos=None)))


def test_wrong_files(tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", numbered(1))
    said = report(lambda: data.jsonl(tmp_path / "promts.jsonl", batch=1).schema())
    assert "There is no file" in said and "Did you mean" in said and "prompts.jsonl?" in said
    assert "There is no file" in report(lambda: data.jsonl(str(tmp_path / "*.json"), batch=1).schema())
    assert "There is no file" in report(lambda: data.parquet(tmp_path / "no" / "x", batch=1).cursor().draw())
    assert "No file is given" in report(lambda: data.jsonl([], batch=1).schema())
    assert "no parquet file" in report(lambda: data.parquet(tmp_path / "prompts.jsonl", batch=1).schema())
    for empty in ("", "\n \n"):
        (tmp_path / "empty.jsonl").write_text(empty)
        assert "has no rows" in report(lambda: data.jsonl(tmp_path / "empty.jsonl", batch=1).schema())
        assert "has no rows" in report(lambda: data.jsonl(tmp_path / "empty.jsonl", batch=1).cursor().draw())


class Frame:
    """Has columns and a length, and no rows by number: as a DataFrame."""

    def __len__(self):
        return 1


@pytest.mark.parametrize("given", [Frame(), "prompts.jsonl", {"prompt": "a"}, iter([]), None])
def test_rows_that_are_no_list_are_refused_where_they_are_given(given):
    said = report(lambda: data.rows(given, batch=1))
    assert f"this is a {type(given).__name__}." in said and "data.to_dict('records')" in said and "test_data.py" in said


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_that_is_one_list_is_read_otherwise(tmp_path, indent):
    path = tmp_path / "all.json"
    path.write_text(json.dumps(numbered(3), indent=indent))
    said = report(lambda: data.jsonl(path, batch=1).schema())
    assert "all.json:1" in said and "fl.data.rows(json.load(open(path)), ...)" in said


@pytest.mark.parametrize("line", ['{"prompt": ', "[1, 2]", "7", "\udcff"])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    lines = [json.dumps(row) for row in numbered(60)]
    lines[50] = line
    path.write_bytes("\n\n".join(lines).encode(errors="surrogateescape"))
    source = data.jsonl(path, batch=60)
    source.schema()  # the first lines are fine
    assert "bad.jsonl:101" in report(lambda: source.cursor().draw())
    lines[2] = line
    path.write_bytes("\n\n".join(lines).encode(errors="surrogateescape"))
    assert "bad.jsonl:5" in report(lambda: data.jsonl(path, batch=1).schema())


def test_wrong_rows_of_files_are_named(tmp_path, tokenizer):
    rows = [*numbered(4), {"prompt": "", "answer": 0}, *numbered(2)]
    source = data.jsonl(write_jsonl(tmp_path / "a.jsonl", rows), batch=7)
    assert "a.jsonl:5" in report(lambda: make_batch(source, tokenizer))
    source = data.parquet(write_parquet(tmp_path / "a.parquet", rows), batch=7)
    said = report(lambda: make_batch(source, tokenizer))
    assert "a.parquet" in said and "row 4" in said
    assert "row 4" in report(lambda: make_batch(data.hf(save_hf(tmp_path / "hf", rows), batch=7), tokenizer))


def test_wrong_data_sets(tmp_path):
    save_hf(tmp_path / "sums", numbered(2), "train")
    said = report(lambda: data.hf(tmp_path / "sums", split="trian", batch=1).schema())
    assert "no split 'trian'" in said and "Write split='train'" in said
    said = report(lambda: data.hf(tmp_path / "sum", batch=1).cursor().draw())
    assert "cannot be loaded" in said and "sums?" in said
    for kind in ("jsonl", "parquet"):
        (file := tmp_path / f"rows.{kind}").write_text("")
        assert f"It is a file: write fl.data.{kind}(" in report(lambda file=file: data.hf(file, batch=1).schema())


def test_a_missing_library_says_which_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write_jsonl(tmp_path / "x.parquet", numbered(1))
    assert "extra 'data'" in report(lambda: data.parquet(tmp_path / "x.parquet", batch=1).schema())


def test_schema_is_light(tmp_path):
    paths = {
        "jsonl": write_jsonl(tmp_path / "a.jsonl", numbered(3)),
        "parquet": write_parquet(tmp_path / "a.parquet", numbered(3)),
        "hf": save_hf(tmp_path / "hf", numbered(3)),
    }
    code = "import sys\nfrom flowrl import data\n"
    code += "".join(f"data.{kind}({str(path)!r}, batch=2).schema()\n" for kind, path in paths.items())
    code += "bad = {'torch', 'transformers', 'tokenizers'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("# ") for line in re.findall(r"# [{\[].*", page)] == [printed[i] for i in (0, 2, 4)]
    assert re.fullmatch(r"\d+\+\d+=\d+;", printed[3])
