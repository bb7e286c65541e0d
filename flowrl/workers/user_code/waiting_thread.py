"""Whether a thread, or the whole process, waits for something, as opposed to computing or standing in line for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_BUSY = 0.2  # share of the time that a thread computes which waits for nothing
_ALIVE = 0.1  # the same of a process; who looks at it takes some of it


class Waiting:
    """What has used few of the seconds since it was asked about last, by ``seconds`` of the processor, has waited."""

    def __init__(self, seconds: Callable[[], float], share: float) -> None:
        self._seconds, self._share = seconds, share
        self._at, self._used = time.monotonic(), seconds()

    def has_waited(self) -> bool:
        """Whether it has waited since this was asked last."""
        now, used = time.monotonic(), self._seconds()
        share = (used - self._used) / max(now - self._at, 1e-9)
        self._at, self._used = now, used
        return share < self._share


class WaitingThread:
    """Looks at the thread that makes it: :meth:`waits` is asked by others.

    >>> WaitingThread().waits()
    False
    """

    def __init__(self) -> None:
        self._number = threading.get_native_id()
        clock = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = clock(threading.get_ident()) if clock is not None else None
        self._waiting = Waiting(self._seconds, _BUSY)

    def waits(self) -> bool:
        """Whether it has waited for most of the time since this was asked last, and does so now.

        A thread that would compute if the machine let it does not wait. Where nobody can tell, it does.
        """
        return self._waiting.has_waited() and not _is_runnable(self._number)

    def _seconds(self) -> float:
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return 0.0


class WaitingProcess:
    """Looks at all threads of this process but the one that asks."""

    def __init__(self) -> None:
        self._waiting = Waiting(time.process_time, _ALIVE)

    def waits(self) -> bool:
        """Whether none of them has computed since this was asked last, nor would if the machine let it.

        Where nobody can tell what would compute, who has not does not.
        """
        if not self._waiting.has_waited():
            return False
        with suppress(OSError):  # another system than Linux
            own = threading.get_native_id()
            return not any(_is_runnable(task) for name in os.listdir("/proc/self/task") if (task := int(name)) != own)
        return True


def _is_runnable(task: int) -> bool:
    """Whether a thread has a processor, or stands in line for one."""
    try:
        with open(f"/proc/self/task/{task}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):  # another system than Linux, or a thread that has ended
        return False
