"""Which fields a function reads by name: what its text says, and what it leaves open."""

import functools
from contextlib import suppress

import pytest

from flowrl.batch import Batch
from flowrl.graph.script.fields_read_in_source import fields_read


def plain(batch):
    kept = batch.filter(batch.rewards > 0)
    return {"answer": [*batch.answer.to_list(), *batch["prompt"], *batch.columns["state"]], "kept": kept.others}


def asks(batch):
    if hasattr(batch, "answer") and "prompt" in batch.fields:
        return batch.answer, batch.prompt
    return None


def catches(batch):
    try:
        return batch.answer
    except AttributeError:
        with suppress(AttributeError):
            return batch.prompt


def computes(batch):
    return [getattr(batch, name) for name in batch.fields], batch[str(1)]


def binds(batch):
    batch = batch.with_columns({"answer": batch.rewards})
    return batch.answer


def hands_on(batch):
    return list(map(lambda batch: batch.answer, [batch]))


def misspells_a_method(batch):
    return batch.fliter(batch.rewards > 0)


@functools.wraps(plain)
def wrapped(batch):
    return plain(batch)


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (plain, ["rewards", "answer", "prompt", "state"]),
        (asks, []),
        (catches, []),
        (computes, []),
        (binds, []),
        (hands_on, []),
        (misspells_a_method, ["rewards"]),
        (wrapped, []),
        (lambda batch: batch.answer, []),
        (len, []),
    ],
)
def test_fields_of_a_batch_are_read_as_attributes_and_items(fn, names):
    read = fields_read(fn, "batch", inside=("columns",), besides=dir(Batch))
    assert sorted(read) == sorted(names)
    assert all(at.file == __file__ and f"{n}" in at.text for n, at in read.items())


def test_attributes_are_no_names_unless_it_is_said():
    assert list(fields_read(plain, "batch")) == ["prompt"]
