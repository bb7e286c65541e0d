"""The journal of a rank: calls that run beside each other write into one file, and nothing of it is lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from flowrl.batch import CallInfo
from flowrl.runtime.distributed.rank_process import rank_journal
from flowrl.runtime.distributed.rank_process.rank_journal import RankJournal
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


def test_a_journal_that_nobody_asked_for_makes_no_file(tmp_path):
    made = RankJournal(tmp_path / "journal.games.2.jsonl")
    made.forget()
    made.sync()
    assert not list(tmp_path.iterdir())
