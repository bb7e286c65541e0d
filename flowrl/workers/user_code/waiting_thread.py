"""Whether a thread waits for something, as opposed to computing, or being kept from it by what else runs."""

from __future__ import annotations

import threading
import time

_BUSY = 0.2  # share of the time that a thread computes which waits for nothing


class WaitingThread:
    """Looks at the thread that makes it: :meth:`waits` is asked by others.

    >>> WaitingThread().waits()
    False
    """

    def __init__(self) -> None:
        self._stat = f"/proc/self/task/{threading.get_native_id()}/stat"
        clock = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = clock(threading.get_ident()) if clock is not None else None
        self._at, self._used = time.monotonic(), self._seconds()

    def waits(self) -> bool:
        """Whether it has waited for most of the time since this was asked last, and does so now.

        A thread that would compute if the machine or Python let it does not wait. Where nobody can tell, it does.
        """
        now, used = time.monotonic(), self._seconds()
        share = (used - self._used) / max(now - self._at, 1e-9)
        self._at, self._used = now, used
        return share < _BUSY and not self._is_runnable()

    def _seconds(self) -> float:
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return 0.0

    def _is_runnable(self) -> bool:
        """Whether it has a processor, or stands in line for one."""
        try:
            with open(self._stat, "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError):  # another system than Linux, or a thread that has ended
            return False
