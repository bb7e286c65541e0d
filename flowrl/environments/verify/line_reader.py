"""Lines that another process writes to a pipe, each waited for no longer than it may take."""

from __future__ import annotations

import math
import os
import select
import time


class LineReader:
    """Reads the lines of a pipe, each of any length.

    >>> from flowrl.environments.verify.line_reader import LineReader
    >>> import os; read, write = os.pipe(); os.write(write, b"one\\ntwo\\n")
    8
    >>> reader = LineReader(read); reader.read(1.0), reader.read(1.0)
    (b'one', b'two')
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()  # select.select takes no descriptor above 1,023, which a large run reaches
        self._poll.register(fd, select.POLLIN)
        self._unread = bytearray()

    def read(self, seconds: float) -> bytes:
        """The next line without its end. Raises TimeoutError where it takes longer, EOFError where none comes."""
        deadline, searched = time.monotonic() + seconds, 0
        while self._unread.find(b"\n", searched) < 0:
            searched = len(self._unread)
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(math.ceil(left * 1000)):
                raise TimeoutError(f"no line came in {seconds:.0f} s")
            found = os.read(self._fd, 1 << 16)
            if not found:
                raise EOFError("no line comes any more")
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\n")
        return bytes(line)
