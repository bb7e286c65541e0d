"""What touched the world is answered by row: every row is asked for once, whoever asks, and in whatever parts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.runtime.storage.answers.external_answers import once
from flowrl.runtime.storage.journal import Journal

ASKED: list[tuple[int, ...]] = []
DOWN: set[tuple[int, ...]] = set()
KEYS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
INFO = CallInfo(0, "train", 3, "judge.alone", 0)


class Judge(fl.Worker):
    name = "judge"

    @fl.op(reads="x", adds="r: f32[]", cost="external", pieces="row")
    def alone(self, batch, *, scale: float = 1.0):
        ASKED.extend(batch.keys)
        return {"r": batch.x.values * scale}

    @fl.op(reads="x", adds="r: f32[]", cost="external", pieces=True)
    def in_its_group(self, batch):
        ASKED.extend(batch.keys)
        return {"r": batch.x.values - batch.group_mean("x").values}

    @fl.op(reads="x", adds="r: f32[]", cost="external")
    def among_all(self, batch):
        ASKED.extend(batch.keys)
        return {"r": batch.x.values - batch.x.mean()}

    @fl.op(reads="x", adds="t: f32[*turn]", rows="expand", cost="external", pieces=True)
    def play(self, batch, *, n: int):
        ASKED.extend(batch.keys)
        rows = batch.expand(n)
        return {"t": [[x, float(key[-1])] for x, key in zip(rows.x.values.tolist(), rows.keys, strict=True)]}

    @fl.op(reads="x", rows="filter", cost="external", pieces="row")
    def pick(self, batch):
        ASKED.extend(batch.keys)
        return batch.filter(batch.x.values % 2 == 0)

    @fl.op(reads="x", adds="x: f32[]", rows="apart", cost="external", pieces="row")
    def ask_again(self, batch):
        ASKED.extend(batch.keys)
        return {"x": -batch.x.values}

    @fl.op(reads="x", adds="x: f32[]", rows="regroup", cost="external")
    def shorten(self, batch):
        ASKED.extend(batch.keys)
        return fl.Batch.of(batch.keys[:2], x=fl.Column.of([7.0, 8.0], dtype="f32"))

    @fl.op(reads="x", adds="r: f32[], why: any", cost="external", pieces="row")
    def one_by_one(self, batch):
        for row in reversed(range(len(batch))):
            if batch.keys[row] in DOWN:
                raise OSError("down")
            ASKED.append(batch.keys[row])
            yield row, {"r": float(batch.x.values[row]) * 2, "why": f"row {row}"}

    @fl.op(reads="x", cost="external")
    def tell(self, batch) -> fl.Metrics:
        ASKED.extend(batch.keys)
        return fl.Metrics(told=len(batch))


@pytest.fixture
def ask(tmp_path):
    """Asks as a process of its own would: with what the journal's file holds."""
    ASKED.clear()

    def asking(op, rows, info=INFO, **kwargs):
        said = []
        judge = Judge.__dict__[op]
        journal = Journal(tmp_path / "journal.jsonl")
        try:
            made = once(journal, (0, 7), judge, Judge(), judge.bind((rows,), kwargs), {}, info, said.append)
        finally:
            journal.close()
        asked, ASKED[:] = list(ASKED), []
        return made, asked, said

    return asking


def batch(keys=KEYS, **other):
    """Rows of these keys; ``other`` says what x is of some, by its place."""
    x = [float(KEYS.index(key)) for key in keys]
    for place, value in other.items():
        x[int(place[1:])] = value
    return fl.Batch.of(keys, x=fl.Column.of(x, dtype="f32"), unread=fl.Column.of(x, dtype="f32"))


def test_rows_that_an_op_yields_are_kept_as_they_come(ask):
    DOWN.add(KEYS[2])
    with pytest.raises(OSError, match="down"):
        ask("one_by_one", batch())
    asked, ASKED[:] = list(ASKED), []
    DOWN.clear()
    assert asked == [KEYS[5], KEYS[4], KEYS[3]]
    made, asked, said = ask("one_by_one", batch())
    assert asked == [KEYS[2], KEYS[1], KEYS[0]] and said == []
    assert made.keys == tuple(KEYS) and made.r.to_list() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ask("one_by_one", batch(KEYS[::-1]))[1] == []


@pytest.mark.parametrize("op", ["alone", "in_its_group", "among_all"])
def test_the_same_rows_are_asked_for_once(ask, op):
    first, asked, _ = ask(op, batch())
    again, none, said = ask(op, batch().rename(unread="other"))
    assert asked == KEYS and none == [] and said == []
    assert again.fields == ("x", "other", "r") and again.r.to_list() == first.r.to_list()


def test_rows_that_were_asked_for_in_other_parts_have_their_answers(ask):
    whole, _, _ = ask("among_all", batch())
    for part in (KEYS[:2], KEYS[2:]):
        ask("alone", batch(part))
    made, asked, said = ask("alone", batch(KEYS[::-1]))
    assert asked == [] and said == []
    assert made.keys == tuple(KEYS[::-1]) and made.r.to_list() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert whole.r.to_list() != made.r.to_list()


def test_only_rows_without_an_answer_are_asked_for(ask):
    ask("alone", batch(KEYS[1:4]))
    made, asked, said = ask("alone", batch())
    assert asked == [KEYS[0], KEYS[4], KEYS[5]] and said == []
    assert made.r.to_list() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_of_rows_that_differ_it_is_said_which_and_in_what_and_they_alone_are_asked_for_again(ask):
    ask("alone", batch())
    made, asked, said = ask("alone", batch(_1=9.0, _4=8.0))
    assert asked == [KEYS[1], KEYS[4]] and made.r.to_list() == [0.0, 9.0, 2.0, 3.0, 8.0, 5.0]
    assert said == [
        "judge.alone of step 3: 2 of 6 rows have other x than when they were answered ((0, 1), (2, 0)); 2 rows are asked again"
    ]
    assert ask("alone", batch(_1=9.0, _4=8.0))[1:] == ([], [])
    assert ask("alone", batch())[1:] == ([], []), "the first answers are there still"


def test_rows_that_depend_on_their_prompt_are_asked_for_with_it(ask):
    ask("in_its_group", batch())
    made, asked, said = ask("in_its_group", batch(_1=9.0))
    assert asked == KEYS[:2] and made.r.to_list() == [-4.5, 4.5, -0.5, 0.5, -0.5, 0.5]
    assert said == [
        "judge.in_its_group of step 3: 1 of 6 rows have other x than when they were answered ((0, 1)); 2 rows are asked "
        "again"
    ]
    _, asked, _ = ask("in_its_group", batch([(2, 1)]))
    assert asked == [(2, 1)], "it was answered among two"


def test_rows_that_depend_on_all_are_asked_for_with_all(ask):
    ask("among_all", batch())
    _, asked, _ = ask("among_all", batch(_1=9.0))
    assert asked == KEYS
    _, asked, _ = ask("among_all", batch(KEYS[:3]))
    assert asked == KEYS[:3]


def test_other_arguments_are_another_question(ask):
    ask("alone", batch())
    made, asked, said = ask("alone", batch(), scale=2.0)
    assert asked == KEYS and made.r.to_list() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert "6 of 6 rows have other rows beside them, or other arguments, than when they were answered" in said[0]


def test_rows_that_become_several_and_rows_that_are_left_out(ask):
    whole, _, _ = ask("play", batch(KEYS[:4:2]), n=2)
    made, asked, _ = ask("play", batch(KEYS[:6:2]), n=2)
    assert asked == [KEYS[4]] and made.keys == batch(KEYS[:6:2]).expand(2).keys
    assert made.take([0, 1, 2, 3]).t.to_list() == whole.t.to_list()
    ask("pick", batch(KEYS[:4]))
    made, asked, _ = ask("pick", batch())
    assert asked == KEYS[4:] and made.keys == (KEYS[0], KEYS[2], KEYS[4])


def test_rows_that_have_the_added_fields_alone(ask):
    ask("ask_again", batch(KEYS[:4]))
    made, asked, _ = ask("ask_again", batch())
    assert asked == KEYS[4:] and made.keys == tuple(KEYS) and made.fields == ("x",)
    assert made.x.to_list() == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    again, none, _ = ask("ask_again", batch())
    assert none == [] and again.x.to_list() == made.x.to_list()


def test_new_rows_with_fields_called_like_those_that_were_read_are_answered_with_their_own(ask):
    first, asked, _ = ask("shorten", batch())
    again, none, said = ask("shorten", batch())
    assert asked == KEYS and none == [] and said == []
    assert (again.keys, again.fields, again.x.to_list()) == (first.keys, ("x",), first.x.to_list())


def test_answers_of_another_op_are_none(ask):
    """A script that was changed, or a run that has gone back before its loop's end, asks another op at the same place."""
    ask("alone", batch())
    made, asked, said = ask("in_its_group", batch(), info=replace(INFO, op="judge.in_its_group"))
    assert asked == KEYS and said == [] and made.r.to_list() == [-0.5, 0.5] * 3


def test_a_call_that_gives_numbers_is_made_once_too(ask):
    first, asked, _ = ask("tell", batch())
    again, none, _ = ask("tell", batch())
    assert asked == KEYS and none == [] and again == first == fl.Metrics(told=6) and again.told == 6


def test_answers_of_an_older_flowrl_hold_for_the_rows_that_they_were_given_for(ask, tmp_path):
    read = batch().select("x")
    added = fl.Batch.of(KEYS, r=fl.Column.of([1.0] * 6, dtype="f32"))
    line = {"program": 0, "call": 7, "piece": 0, "inputs": read.digest(), "adds": added.to_record()}
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n")
    made, asked, _ = ask("alone", batch())
    assert asked == [] and made.r.to_list() == [1.0] * 6
    _, asked, said = ask("alone", batch(_0=7.0))
    assert asked == KEYS
    assert said == [
        "judge.alone of step 3: its answers were journalled by an older flowrl for other rows; it is asked again"
    ]
