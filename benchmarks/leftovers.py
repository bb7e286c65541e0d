"""What processes hold and leave behind: descriptors, threads, files of shared memory, processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SHARED = Path("/dev/shm")
SETTLED = 3  # faults after which nothing is to grow any more
SLACK = 8  # of threads and descriptors that come and go with what is under way


def held_by(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


class Held:
    """What the driver and the ranks of a run hold, looked at after each fault while they are the same processes."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._seen: dict[int, list[tuple[int, int]]] = {}

    def look(self) -> None:
        """Note what there is now."""
        pids = [self._run.process.pid]
        for rank in range(6):
            with suppress(OSError, ValueError, LookupError):  # one that is gone is not there
                pids.append(self._run.pid(rank))
        for pid in pids:
            with suppress(OSError):
                self._seen.setdefault(pid, []).append(held_by(pid))

    def grown(self) -> str:
        """The processes that hold more than they did after the first faults that they lived through."""
        found: list[str] = []
        for pid, seen in self._seen.items():
            if len(seen) > 2 * SETTLED:
                was, now = (
                    (min(n) for n in zip(*seen[SETTLED : 2 * SETTLED], strict=True)),
                    (min(n) for n in zip(*seen[-SETTLED:], strict=True)),
                )
                for what, a, b in zip(("descriptors", "threads"), was, now, strict=True):
                    if b > a + SLACK:
                        found.append(f"process {pid}: {a} {what}, then {b}")
        return "; ".join(found)


def shared_memory() -> set[str]:
    """The names of files of shared memory, but for hidden ones: those are of other programs, as of browsers."""
    return {name for name in os.listdir(SHARED) if not name.startswith(".")} if SHARED.is_dir() else set()


def left_behind(mark: str, there: set[str], seconds: float = 15.0) -> str:
    """What is still there of the processes that had ``FLOWRL_KILLS=mark``, once they had time to end."""
    until = time.monotonic() + seconds
    while (alive := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    said = [f"process {pid}" for pid in alive]
    new = shared_memory() - there
    said += [f"shared memory {name}" for name in sorted(new) if not _open_somewhere(SHARED / name)]
    return ", ".join(said)


def _marked(mark: str) -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if f"FLOWRL_KILLS={mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def _open_somewhere(file: Path) -> bool:
    """Whether a process has a file open; another run on this machine may have made it meanwhile."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if str(file) in (folder / "maps").read_text():
                    return True
                if any(os.readlink(fd) == str(file) for fd in (folder / "fd").iterdir()):
                    return True
    return False
