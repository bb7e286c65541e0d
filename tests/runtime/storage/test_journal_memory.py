"""Answers stay in the files of a journal: what it remembers is where each line lies, and it reads those that are asked
for."""

from __future__ import annotations

import tracemalloc

import pytest

from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import ResumeError
from flowrl.runtime.storage import journal as journals
from flowrl.runtime.storage.journal import Journal

INFO = CallInfo(7, "train", 0, "world.judge", 0, False)
CALLS, LONG = 200, 2**17


def keep(journal, call, *, uids=(0,), size=8, **how):
    """Keep a text of so many letters for each of some rows."""
    keys = [(uid, 0) for uid in uids]
    adds = Batch.of(keys, why=Column.of([f"{call} {uid} ".ljust(size, "x") for uid in uids], dtype="any"))
    journal.keep(0, call, keys, ["p"] * len(keys), {"x": ["q"] * len(keys)}, of=INFO, adds=adds, **how)


def texts(lines):
    return [text.strip("x ") for line in lines for text in Batch.from_record(line["adds"])["why"].values]


@pytest.fixture
def seen(monkeypatch):
    """The lines that are read back, as (file, how many at once)."""
    found, real = [], journals.read_lines_at
    monkeypatch.setattr(
        journals, "read_lines_at", lambda path, of: (found.append((path.name, len(of))), real(path, of))[1]
    )
    return found


def test_long_answers_take_no_memory_and_are_read_when_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "PART", 8 * LONG)
    tracemalloc.start()
    try:
        journal = Journal(tmp_path / "journal.jsonl")
        for call in range(CALLS):
            keep(journal, call, size=LONG)
        taken = [tracemalloc.get_traced_memory()[0]]
        assert len(list(tmp_path.iterdir())) == CALLS // 8, "it goes over the ends of parts"
        some = [0, 7, 8, 120, CALLS - 1]
        first = [journal.answers(0, call) for call in some]
        assert [texts(lines) for lines in first] == [[f"{call} 0"] for call in some]
        assert all(line["keys"] == ((0, 0),) for lines in first for line in lines)
        journal.sync()
        again = [journal.answers(0, call) for call in some]
        assert again == first
        del again
        journal.sync()
        assert journal.answers(0, 0) == [], "no run asks for it any more"
        journal.forget()
        journal.load({})
        assert [journal.answers(0, call) for call in some] == first
        other = Journal(tmp_path / "journal.games.2.jsonl", beside="journal*.jsonl")
        assert [other.answers(0, call) for call in some] == first, "those of another rank"
        del first
        taken.append(tracemalloc.get_traced_memory()[0])
        assert max(taken) < 2 * LONG, f"{taken} bytes; {CALLS * LONG} are in the files"
        journal.close()
    finally:
        tracemalloc.stop()


def test_lines_whose_rows_are_not_asked_for_are_left_in_the_file(tmp_path, seen):
    """The chunks of a call share its place: each would read what all chunks before it have written."""
    journal = Journal(tmp_path / "journal.jsonl")
    for chunk in range(4):
        keep(journal, 5, uids=range(4 * chunk, 4 * chunk + 4))
    assert journal.answers(0, 5, [(16, 0), (19, 0)]) == [] and seen == []
    (line,) = journal.answers(0, 5, [(9, 0)])
    assert line["keys"] == ((8, 0), (9, 0), (10, 0), (11, 0)) and seen == [("journal.jsonl", 1)]
    assert [line["keys"][0][0] for line in journal.answers(0, 5, [(3, 0), (4, 0)])] == [4, 0], "the newest first"
    assert len(journal.answers(0, 5)) == len(journal.answers(0, 5, [])) == 4
    keep(journal, 6, uids=())
    assert len(journal.answers(0, 6, [(3, 0)])) == 1, "a line of no rows may be of any"
    assert journal.answers(0, 4) == []


def test_rows_that_were_made_of_a_row_are_found_by_its_key(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    adds = Batch.of([(3, 0, 1)], why=Column.of(["made"], dtype="any"))
    journal.keep(0, 5, [(3, 0, 1)], ["p"], {}, of=INFO, adds=adds)
    assert texts(journal.answers(0, 5, [(3, 0)])) == ["made"]


def test_rows_that_failed_are_answers_once_their_call_is_taken(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    keep(journal, 5, failed=True)
    keep(journal, 5, uids=(1,))
    assert texts(journal.answers(0, 5)) == ["5 1"]
    journal.take(0, 5, INFO)
    assert texts(journal.answers(0, 5)) == ["5 1", "5 0"]
    assert texts(Journal(tmp_path / "journal.jsonl").answers(0, 5)) == ["5 1", "5 0"]


def test_what_the_disk_does_not_give_back_counts_for_nothing(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for call in range(3):
        keep(journal, call)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"1 0 xx", b"1 0 xy"))
    assert texts(journal.answers(0, 0)) == ["0 0"] and journal.answers(0, 1) == []
    path.write_bytes(raw[:-20])
    assert texts(journal.answers(0, 1)) == ["1 0"] and journal.answers(0, 2) == []
    path.unlink()
    assert journal.answers(0, 0) == []
    path.mkdir()
    with pytest.raises(ResumeError, match="cannot be read"):
        journal.answers(0, 0)


def test_a_torn_last_line_moves_no_line_after_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    before = Journal(path)
    keep(before, 0)
    before.close()
    path.write_bytes(path.read_bytes() + b'{"program":0,"call":1,"op":"wor')
    journal = Journal(path)
    assert texts(journal.answers(0, 0)) == ["0 0"]
    keep(journal, 1)
    keep(journal, 2)
    assert [texts(journal.answers(0, call)) for call in range(3)] == [["0 0"], ["1 0"], ["2 0"]]


def test_lines_of_an_older_flowrl_without_a_checksum_or_keys_are_answers(tmp_path, seen):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"program":0,"call":3,"inputs":"9f","adds":{}}\n')
    journal = Journal(path)
    assert journal.answers(0, 3, [(7, 0)]) == [{"program": 0, "call": 3, "inputs": "9f", "adds": {}}]
    assert seen == [("journal.jsonl", 1)]
