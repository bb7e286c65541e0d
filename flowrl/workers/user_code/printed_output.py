"""What user code prints is bounded: so much of a call is shown, the rest is left out, and the row is named."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from .rows_in_progress import Row

LIMIT = 1 << 20  # characters that one call of an op may print


class Printed:
    """What one call has printed so far; ``warn`` is told once, when it is too much."""

    def __init__(self, row: Callable[[], Row], warn: Callable[[str], None]) -> None:
        self._row, self._warn = row, warn
        self._left = LIMIT
        self._lock = threading.Lock()

    def write(self, plain: Callable[[str], Any], text: str) -> int:
        """Write a text, as far as there is room."""
        with self._lock:
            shown, before = text[: max(0, self._left)], self._left
            self._left -= len(text)
            is_too_much = before >= 0 > self._left
        if shown:
            plain(shown)
        if is_too_much:
            token = _CALL.set(None)  # what is said of it is shown
            try:
                row = PRINTING.get() or self._row()
                self._warn(f"{row} has printed more than {LIMIT >> 20} MiB; what else this call prints is left out")
            finally:
                _CALL.reset(token)
        return len(text)


_CALL: ContextVar[Printed | None] = ContextVar("flowrl_printed", default=None)
#: The row that prints, where a call has several.
PRINTING: ContextVar[Row | None] = ContextVar("flowrl_row", default=None)


@contextmanager
def bounded_output(row: Callable[[], Row], warn: Callable[[str], None]) -> Iterator[None]:
    """Bound what is printed inside the block, in this thread and in those that inherit its context."""
    for stream in (sys.stdout, sys.stderr):
        _watch(stream)
    token = _CALL.set(Printed(row, warn))
    try:
        yield
    finally:
        _CALL.reset(token)


def _watch(stream: Any) -> None:
    """Have a stream ask the call that writes to it. What has the stream already, such as a logger, asks too."""
    plain = getattr(stream, "write", None)
    if plain is None or hasattr(plain, "asks"):
        return

    def write(text: str) -> int:
        call = _CALL.get()
        return plain(text) if call is None or not isinstance(text, str) else call.write(plain, text)

    write.asks = True  # type: ignore[attr-defined]
    with suppress(AttributeError, TypeError):  # a stream that lets nobody change it
        stream.write = write
