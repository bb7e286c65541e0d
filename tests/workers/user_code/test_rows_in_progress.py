"""The notes of rows that user code is at: what is written of a row is read back, whatever its texts have in them."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flowrl.workers.user_code.rows_in_progress import Notes, Row, at_work

texts = st.text(st.characters(codec=None) | st.sampled_from('"\\\n\t{}'), max_size=400)
rows = st.builds(
    Row,
    program=texts,
    step=st.integers(-1, 10**6),
    op=texts,
    key=st.lists(st.integers(0, 10**9), max_size=5).map(tuple),
    code=texts,
    prompt=texts,
    rows=st.integers(1, 10**6),
)


@given(rows)
def test_a_row_is_read_back_as_it_was_noted(tmp_path_factory, row):
    folder = tmp_path_factory.mktemp("run")
    notes = Notes(folder)
    number = notes.begin(row)
    found = at_work(folder)
    notes.end(number)
    assert at_work(folder) == []
    notes.close()
    if not found:  # the texts of all rows are too long for a line
        assert len(row.program) + len(row.op) > 150
        return
    (read,) = found
    whole = replace(row, op=row.op[:80], code=row.code[-160:], prompt=row.prompt[:60], since=read.since)
    short = replace(whole, code=row.code[-40:], prompt="")
    assert read in (whole, short)


def test_rows_of_several_calls_have_their_own_program_and_code(tmp_path):
    notes = Notes(tmp_path)
    wanted = [
        Row("grpo", step, f"{name}.score", (step, 2), f"exact, {name}.py:12", '1+"2=', 3)
        for step in range(3)
        for name in ("reward", "judge", "format", "length")
    ]
    for row in wanted:
        notes.begin(row)
    assert [replace(row, since=0.0) for row in at_work(tmp_path)] == wanted
    notes.close()


def test_the_place_of_a_row_that_has_ended_is_taken_by_the_next_one(tmp_path):
    notes = Notes(tmp_path)
    first, _ = (notes.begin(Row("grpo", 0, "reward.score", (row, 0), "exact", "")) for row in range(2))
    notes.end(first)
    notes.begin(Row("grpo", 0, "reward.score", (2, 0), "exact", ""))
    assert sorted(row.key for row in at_work(tmp_path)) == [(1, 0), (2, 0)]
    assert (tmp_path / "user_code.jsonl").stat().st_size == 2 * 1024
    notes.close()


def test_a_note_that_comes_as_the_file_is_closed_goes_into_no_other_one(tmp_path):
    """Code that nobody waits for ends when it likes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            notes = Notes(tmp_path)
            number = notes.begin(Row("grpo", 0, "reward.score", (0, 0), "exact", ""))
            late = threading.Thread(target=lambda notes=notes, number=number: (
                notes.end(number), notes.begin(Row("grpo", 0, "reward.score", (1, 0), "exact", ""))))  # fmt: skip
            late.start()
            notes.close()
            other = os.open(tmp_path / "another", os.O_RDWR | os.O_CREAT)  # it gets the number
            late.join()
            os.close(other)
    finally:
        sys.setswitchinterval(before)
    assert (tmp_path / "another").stat().st_size == 0
