"""Lines that several threads append, while the file is closed and its number becomes another file's."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from flowrl.runtime.storage.jsonl import Lines, TailChecksum


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


def test_a_line_that_comes_as_the_tail_is_read_is_in_the_next_mark(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n":0}\n')
    lines, before = Lines(path), Lines(path).mark()  # nobody has computed the checksum of the first
    writer, read = threading.Thread(target=lines.append, args=('{"n":1}',)), TailChecksum.read

    def read_beside(path, size):
        found = read(path, size)
        writer.start()
        writer.join(0.2)  # it waits until the mark is there
        return found

    monkeypatch.setattr(TailChecksum, "read", read_beside)
    assert lines.mark() == before
    writer.join()
    monkeypatch.undo()
    assert lines.mark() == Lines(path).mark()
    lines.close()
