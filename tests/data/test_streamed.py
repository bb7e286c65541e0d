"""Streamed data sets: the same rows as those that are loaded, in an order of their buffers, and places to go on from."""

import json
import os
from typing import Any

import pytest
from byte_tokenizer import make_tokenizer

from flowrl import data
from flowrl.data.identity import identity
from flowrl.errors import DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")


def numbered(n):
    return [{"prompt": f"p{i}", "answer": i} for i in range(n)]


@pytest.fixture(params=["folder of files", "parquet files", "saved", "function"])
def made(request, tmp_path):
    """A function that makes a streamed source of 25 rows with the given options."""
    rows, folder = numbered(25), tmp_path / "rows"
    whole = datasets.Dataset.from_list(rows)
    if request.param == "saved":
        whole.save_to_disk(str(folder))
    else:
        folder.mkdir()
    if request.param == "folder of files":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:11]))
        (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[11:]))
    if request.param == "parquet files":
        whole.to_parquet(folder / "a.parquet", batch_size=4)
    given = (lambda: whole.to_iterable_dataset(num_shards=4)) if request.param == "function" else folder
    return lambda **options: data.hf(given, streaming=True, **options)


def prompts(rows):
    return [row["prompt"] for row in rows]


def test_rows_come_in_their_order_without_shuffle_and_the_end_is_the_end(made):
    source = made(batch=10, shuffle=False, repeat=False)
    assert {name: str(kind) for name, kind in source.schema().items()} == {
        "prompt": "any",
        "prompt_ids": "i32[*prompt]",
        "answer": "any",
    }
    cursor = source.cursor()
    drawn = [cursor.draw() for _ in range(5)]
    assert [len(rows) for rows in drawn] == [10, 10, 5, 0, 0]
    assert [p for rows in drawn for p in prompts(rows)] == [f"p{i}" for i in range(25)]
    assert [row.index for row in drawn[2]] == [20, 21, 22, 23, 24]
    batch = source.to_batch(drawn[2], 20, make_tokenizer())
    assert batch.keys == ((20,), (21,), (22,), (23,), (24,)) and batch.answer.to_list() == [20, 21, 22, 23, 24]


def test_buffers_are_shuffled_and_an_epoch_has_every_row_once(made):
    cursor = made(batch=10, buffer_size=8, seed=3).cursor()
    drawn = prompts(cursor.draw(50))
    assert sorted(drawn[:25]) == sorted(drawn[25:]) == sorted(f"p{i}" for i in range(25))
    assert drawn[:25] != drawn[25:]
    for first in (0, 8, 16, 24):
        assert {int(p[1:]) for p in drawn[first : min(first + 8, 25)]} == set(range(first, min(first + 8, 25)))
    assert prompts(made(batch=5, buffer_size=8, seed=3).cursor().draw(50)) == drawn, "batches have no say in it"
    assert prompts(made(batch=10, buffer_size=8, seed=4).cursor().draw(50)) != drawn


@pytest.mark.parametrize("options", [{"buffer_size": 8, "seed": 1}, {"shuffle": False}, {"buffer_size": 1000}])
def test_a_cursor_goes_on_where_its_state_was_taken(made, options):
    source = made(batch=3, **options)
    cursor = source.cursor()
    expected = [prompts(cursor.draw()) for _ in range(19)]
    cursor = source.cursor()
    for step in range(19):
        state = json.loads(json.dumps(cursor.state()))
        assert prompts(cursor.draw()) == expected[step]
        if step % 4 == 0:
            other = made(batch=3, **options).cursor()
            other.load_state(state)
            assert [prompts(other.draw()) for _ in range(19 - step)] == expected[step:]


def test_a_place_in_buffers_of_another_size_is_refused(made):
    cursor = made(batch=3, buffer_size=8).cursor()
    cursor.draw()
    with pytest.raises(DataError, match="a stream with buffers of 8 rows"):
        made(batch=3, buffer_size=9).cursor().load_state(cursor.state())
    with pytest.raises(DataError, match="in data that is not streamed"):
        made(batch=3).cursor().load_state({"epoch": 0, "index": 3, "rows": 25})
    with pytest.raises(DataError, match="This place is in a stream"):
        data.rows(numbered(3), batch=3).cursor().load_state(cursor.state())


def test_mixed_with_rows_that_are_there(made):
    beside = data.rows([{"prompt": f"q{i}", "answer": -i} for i in range(4)], batch=1)
    mixed = data.mix(
        {"stream": made(batch=1, buffer_size=8), "list": beside}, weights={"stream": 2, "list": 1}, batch=6
    )
    cursor = mixed.cursor()
    expected = [cursor.draw() for _ in range(12)]
    cursor = mixed.cursor()
    for _ in range(5):
        cursor.draw()
    again = mixed.cursor()
    again.load_state(json.loads(json.dumps(cursor.state())))
    assert [again.draw() for _ in range(7)] == expected[5:]


def test_a_mixture_ends_where_its_stream_has_ended(made):
    beside = data.rows([{"prompt": "q", "answer": 0}], batch=1)
    mixed = data.mix({"stream": made(batch=1, repeat=False), "list": beside}, batch=10, exact=True)
    cursor = mixed.cursor()
    drawn = [row for _ in range(9) for row in cursor.draw()]
    assert [name for name, _ in drawn].count("stream") == 25


def test_an_empty_stream(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("")
    with pytest.raises(DataError):
        data.hf(tmp_path / "rows", streaming=True, batch=1).schema()
    none = datasets.Dataset.from_dict({"prompt": []})
    with pytest.raises(DataError, match="has no rows"):
        data.hf(none, streaming=True, batch=1).cursor().draw()


def test_a_stream_that_breaks_off_says_where(tmp_path):
    def load():
        def rows():
            yield from numbered(7)
            raise ConnectionError("the hub hung up")

        return datasets.IterableDataset.from_generator(rows)

    source = data.hf(load, streaming=True, batch=5, shuffle=False)
    cursor = source.cursor()
    assert prompts(cursor.draw()) == [f"p{i}" for i in range(5)]
    with pytest.raises(DataError) as error:
        cursor.draw()
    said = error.value.report()
    assert "broke off" in said and "the hub hung up" in said and "<load(), row 7>" in said


def test_what_cannot_be_streamed_or_read_by_number_says_so(tmp_path):
    yes: Any = "yes"
    stream = datasets.Dataset.from_list(numbered(3)).to_iterable_dataset()
    with pytest.raises(DataError, match="Give a function that returns it"):
        data.hf(stream, streaming=True, batch=1).cursor().draw()
    with pytest.raises(DataError, match="streaming=True"):
        data.hf(lambda: stream, batch=1).cursor().draw()
    with pytest.raises(DataError, match="is a stream, and none of its rows is known before it is drawn"):
        data.stratified(data.hf(lambda: stream, streaming=True, batch=1), by="answer", weights={"1": 1})
    with pytest.raises(DataError, match="buffer_size=0 is not a whole number of at least 1"):
        data.hf("x", streaming=True, buffer_size=0, batch=1)
    with pytest.raises(DataError, match="streaming='yes' is not True or False"):
        data.hf("x", streaming=yes, batch=1)
    with pytest.raises(DataError, match="cannot be loaded"):
        data.hf(tmp_path / "nowhere" / "at" / "all", streaming=True, batch=1).cursor().draw()


def test_a_data_set_that_is_loaded_is_drawn_from():
    whole = datasets.Dataset.from_list(numbered(12)).map(lambda row: {"prompt": row["prompt"] + "!"})
    source = data.hf(whole, batch=12, shuffle=False)
    assert prompts(source.cursor().draw()) == [f"p{i}!" for i in range(12)]
    assert identity(source)["rows"] == whole._fingerprint
    split = data.hf(lambda: datasets.DatasetDict({"test": whole}), split="test", batch=2)
    assert list(split.schema()) == ["prompt", "prompt_ids", "answer"]
    with pytest.raises(DataError, match="Write split='test'"):
        data.hf(lambda: datasets.DatasetDict({"test": whole}), split="tst", batch=2).schema()


def test_what_a_stream_is_says_its_buffer(made):
    assert identity(made(batch=1, buffer_size=8))["rows"].endswith(", streamed by 8")


def test_a_run_goes_on_in_the_middle_of_a_stream(tmp_path):
    import flowrl as fl

    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered(40)))

    class Notes(fl.Worker):
        keeps = ("said",)

        def __init__(self) -> None:
            self.said: list[str] = []

        @fl.op(reads="prompt: any", updates="said")
        def note(self, batch) -> fl.Metrics:
            self.mark_updated()
            self.said += batch.prompt.to_list()
            return fl.Metrics(hash=sum(int(p[1:]) * (i + 1) for i, p in enumerate(self.said)))

    def run(out, steps, **how):
        flow = fl.Flow("streamed")
        notes = flow.worker(Notes, name="notes")

        @flow.program
        def train(steps: int = 20):
            rows = fl.data.hf(folder, streaming=True, buffer_size=16, batch=3, tokenizer=make_tokenizer)
            for step, batch in flow.steps(rows, steps):
                flow.log(step, notes.note(batch))

        flow.run(out=tmp_path / out, quiet=True, checkpoint_every=1, steps=steps, **how)
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["hash"] for line in lines]

    whole = run("whole", 20)
    run("parts", 8)
    assert run("parts", 20, resume=True) == whole and len(whole) == 20 and os.listdir(folder) == ["a.jsonl"]
