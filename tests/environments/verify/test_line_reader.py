"""Lines of a pipe come whole and in order, or the wait for them ends."""

import fcntl
import os
import resource
import threading

import pytest

from flowrl.environments.verify.line_reader import LineReader


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for fd in ends:
        os.close(fd)


def test_lines_come_whole_however_they_were_written(pipe):
    read, write = pipe
    long = b"x" * 200_000
    writes = [b"one\ntw", b"o\n\n", *(long[i : i + 7_000] for i in range(0, len(long), 7_000)), b"\nlast\n"]
    writer = threading.Thread(target=lambda: [os.write(write, part) for part in writes])
    writer.start()
    reader = LineReader(read)
    assert [reader.read(10) for _ in range(5)] == [b"one", b"two", b"", long, b"last"]
    writer.join()


def test_a_line_that_does_not_come_ends_the_wait_and_is_there_for_the_next(pipe):
    read, write = pipe
    reader = LineReader(read)
    os.write(write, b"hal")
    with pytest.raises(TimeoutError, match="no line came in 0 s"):
        reader.read(0.01)
    os.write(write, b"f\n")
    assert reader.read(10) == b"half"


def test_the_end_of_the_pipe_is_no_line(pipe):
    read, write = pipe
    reader = LineReader(read)
    os.write(write, b"one\nhalf")
    os.close(write)
    pipe[1] = os.dup(read)  # what the fixture closes
    assert reader.read(10) == b"one"
    with pytest.raises(EOFError):
        reader.read(10)


def test_a_run_may_have_more_than_a_thousand_descriptors(pipe):
    """``select.select`` takes none above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this machine lets a process have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        high = fcntl.fcntl(pipe[0], fcntl.F_DUPFD, 2000)
        try:
            os.write(pipe[1], b"one\n")
            assert LineReader(high).read(10) == b"one"
        finally:
            os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
