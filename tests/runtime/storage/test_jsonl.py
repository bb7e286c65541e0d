"""Lines that several threads append, while the file is closed and its number becomes another file's."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from flowrl.runtime.storage.jsonl import Lines


@pytest.fixture
def often():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_line_that_comes_as_the_file_is_closed_goes_into_it_and_no_other(tmp_path, often):
    lines, failed = Lines(tmp_path / "a.jsonl"), []

    def add(writer: int) -> None:
        try:
            for number in range(2000):
                lines.append(f'{{"of":{writer},"n":{number}}}')
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=add, args=(writer,)) for writer in range(2)]
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        lines.close()
        os.close(os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT | os.O_APPEND))  # it gets the number
    lines.close()
    assert not failed and (tmp_path / "b").stat().st_size == 0
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 4000
