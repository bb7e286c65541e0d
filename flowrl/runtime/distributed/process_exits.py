"""How processes of this host have ended that are no children of this one: by which signal, and whether for memory."""

from __future__ import annotations

import os
import signal
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
#: Linux 6.15 and later keep how a process ended for whoever has a pidfd of it: ``PIDFD_GET_INFO``, a record of 64 bytes
#: that begins with a mask of what is asked for and ends with the status.
_GET_INFO, _EXIT, _SIZE = (3 << 30) | (64 << 16) | (0xFF << 8) | 11, 1 << 3, 64
_RAN_OUT = "it ran out of memory, and the kernel's memory killer ended it"


@dataclass(frozen=True)
class Counter:
    """A file that counts how often the kernel has ended a process for memory: ``memory.events`` of a control group.

    ``limit`` is the file of the bytes that the group may have.
    """

    file: Path
    limit: Path | None = None

    def read(self) -> int:
        """How often so far; 0 where the file cannot be read."""
        with suppress(OSError, ValueError):
            for line in self.file.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
        return 0

    def bytes(self) -> int | None:
        """How much memory the group may have; None for one without a limit of its own."""
        with suppress(OSError, ValueError, AttributeError):
            found = int(self.limit.read_text())  # type: ignore[union-attr]
            return found if found < 1 << 60 else None
        return None


def counter_of(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> Counter:
    """The counter of a process: that of its control group, of version 2 or 1; else that of the whole machine."""
    with suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, kinds, place = line.split(":", 2)
            inside = place.lstrip("/")
            if not kinds:
                for root in (cgroups, cgroups / "unified"):
                    group = root / inside
                    if (group / "memory.events").is_file():
                        return Counter(group / "memory.events", group / "memory.max")
            elif "memory" in kinds.split(","):
                group = cgroups / "memory" / inside
                if (group / "memory.oom_control").is_file():
                    return Counter(group / "memory.oom_control", group / "memory.limit_in_bytes")
    return Counter(proc / "vmstat")


class Watched:
    """A process of this host: ``Watched(pid).ended()`` says how it ended, ``it ended with status 3``.

    Several threads may ask, and one may let go of it meanwhile: what it was called by may be another file's by then.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._counter = counter_of(pid)
        self._before = self._counter.read()
        self._lock = threading.Lock()
        self._handle = -1
        with suppress(OSError, AttributeError):  # it is gone, or the system has no pidfds
            self._handle = os.pidfd_open(pid)

    def ended(self) -> str:
        """How it ended, as far as the system says; empty where it does not."""
        with self._lock:
            status = self._status()
        if status in (None, -signal.SIGKILL) and self._counter.read() > self._before:
            limit = self._counter.bytes()
            return _RAN_OUT + (f" (its control group may have {limit / (1 << 30):.1f} GiB)" if limit else "")
        if status == -signal.SIGKILL:
            return "it was killed by SIGKILL, which the run did not send; the kernel's memory killer is the usual cause"
        if status is None:
            return ""
        return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"

    def _status(self) -> int | None:
        """The status as subprocess writes it: minus the signal. None while it runs, and where nobody knows."""
        if self._handle < 0:
            return None
        import fcntl

        with suppress(OSError):  # its parent has not asked yet: it is there, and tells everybody
            state, *_, status = (PROC / str(self._pid) / "stat").read_text().rpartition(")")[2].split()
            if state == "Z":
                return os.waitstatus_to_exitcode(int(status))
        said = bytearray(struct.pack("Q", _EXIT).ljust(_SIZE, b"\0"))
        try:
            fcntl.ioctl(self._handle, _GET_INFO, said)
        except OSError:
            return None
        if not struct.unpack_from("Q", said)[0] & _EXIT:
            return None
        return os.waitstatus_to_exitcode(struct.unpack_from("i", said, _SIZE - 4)[0])

    def close(self) -> None:
        """Let go of the process."""
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1
