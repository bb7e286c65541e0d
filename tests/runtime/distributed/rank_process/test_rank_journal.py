"""The journal of a rank: calls that run beside each other write into one file, and nothing of it is lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from flowrl.batch import CallInfo
from flowrl.runtime.distributed.rank_process import rank_journal
from flowrl.runtime.distributed.rank_process.rank_journal import RankJournal
from flowrl.runtime.storage import journal as journals
from flowrl.runtime.storage.journal import Journal
from flowrl.runtime.storage.jsonl import read_lines

ROWS = CallInfo(program="p", op="game.rollout")


def keep(journal: Journal, call: int) -> None:
    journal.keep(0, call, [(call,)], ["print"], {}, of=ROWS, value=float(call))


def calls_in(path) -> list[int]:
    return sorted(line.record["call"] for line in read_lines(path) if line.record is not None)


def test_calls_that_open_it_at_the_same_time_lose_none_of_their_lines(tmp_path, monkeypatch):
    """Each of two journals of a file once dropped what the other had written: these rows were asked for again."""
    count = 4
    gate = threading.Barrier(count)

    class SlowlyOpened(Journal):
        made = 0

        def __init__(self, *args, **how) -> None:
            super().__init__(*args, **how)
            SlowlyOpened.made += 1
            time.sleep(0.05 * SlowlyOpened.made)  # the first is written to before the second is there

    monkeypatch.setattr(rank_journal, "Journal", SlowlyOpened)
    made = RankJournal(tmp_path / "journal.games.2.jsonl")

    def call(number: int) -> None:
        gate.wait(10)
        keep(made.get({}), number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(call, range(count)))
    assert calls_in(tmp_path / "journal.games.2.jsonl") == list(range(count))


def test_a_call_that_goes_on_after_it_was_forgotten_loses_no_line(tmp_path):
    path = tmp_path / "journal.games.2.jsonl"
    made = RankJournal(path)
    old = made.get({})
    keep(old, 0)
    made.forget()
    keep(made.get({}), 1)
    keep(old, 2)  # of a call that began before
    keep(made.get({}), 3)
    assert calls_in(path) == [0, 1, 2, 3]


def test_what_other_ranks_have_written_is_read_after_it_was_forgotten(tmp_path):
    made, other = (RankJournal(tmp_path / f"journal.games.{rank}.jsonl") for rank in (2, 3))
    assert made.get({}).answers(0, 7) == []
    keep(other.get({}), 7)
    assert made.get({}).answers(0, 7) == [], "it does not read at each call"
    made.forget()
    assert [line["keys"] for line in made.get({}).answers(0, 7)] == [((7,),)]


def test_what_others_have_written_is_read_by_the_first_call_after_ranks_were_lost(tmp_path, monkeypatch):
    """Its rows may be of one that is gone."""
    monkeypatch.setattr(journals, "PART", 100)
    made, other = (RankJournal(tmp_path / f"journal.games.{rank}.jsonl") for rank in (2, 3))
    assert made.get({}).answers(0, 7) == []
    keep(other.get({}), 6)
    keep(other.get({}), 7)
    assert made.get({}, 0).answers(0, 7) == []
    found = made.get({"journal.games.3": 1}, 2)
    assert found.answers(0, 7) and not found.answers(0, 6), "a call needs no earlier parts for that"
    keep(other.get({}), 8)
    assert made.get({"journal.games.3": 1}, 2).answers(0, 8) == [], "once is enough"
    assert made.get({"journal.games.3": 1}, 1).answers(0, 8) == []
    assert made.get({"journal.games.3": 0}, 1).answers(0, 6), "a call of before may need them still"


def test_parts_before_the_one_that_is_asked_for_are_read_once_a_call_needs_them(tmp_path, monkeypatch):
    """A rank that is started again late in a run once read all that the run had ever written."""
    monkeypatch.setattr(journals, "PART", 100)
    written = Journal(tmp_path / "journal.p.1.jsonl")
    for number in range(5):
        keep(written, number)
    read, real = [], journals.read_lines
    monkeypatch.setattr(journals, "read_lines", lambda path: (read.append(path.name), real(path))[1])
    made = RankJournal(tmp_path / "journal.p.2.jsonl")
    newest = [f"journal.p.1.00000{part}.jsonl" for part in (3, 4)]
    keep(made.get({"journal.p.1": 3}), 7)
    assert read == newest
    assert made.get({"journal.p.1": 4}).answers(0, 3), "what was read stays known"
    assert made.get({"journal.p.1": 3, "journal.p.2": 9}).answers(0, 7) and read == newest
    early = made.get({"journal": 2})  # of a call that was made before that checkpoint, and is made again
    assert early.answers(0, 0) and early.answers(0, 7)
    assert read[2:] == ["journal.p.1.jsonl", *(f"journal.p.1.00000{part}.jsonl" for part in range(1, 5)),
                        "journal.p.2.jsonl"]  # fmt: skip
    assert made.get({}) is made.get({"journal.p.1": 3}) is early and len(read) == 8
    made.forget()
    assert made.get({"journal.p.1": 4}).answers(0, 4) and read[8:] == [newest[1], "journal.p.2.jsonl"]


def test_a_call_that_needs_earlier_parts_of_one_journal_does_not_forget_those_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "PART", 100)
    for rank in (1, 2):
        written = Journal(tmp_path / f"journal.p.{rank}.jsonl")
        for number in range(3):
            keep(written, 10 * rank + number)
    made = RankJournal(tmp_path / "journal.p.3.jsonl")
    assert made.get({"journal.p.1": 0, "journal.p.2": 2}).answers(0, 10)
    found = made.get({"journal.p.1": 2, "journal.p.2": 0})
    assert found.answers(0, 10) and found.answers(0, 20)


def test_a_journal_that_nobody_asked_for_makes_no_file(tmp_path):
    made = RankJournal(tmp_path / "journal.games.2.jsonl")
    made.forget()
    made.sync()
    assert not list(tmp_path.iterdir())
