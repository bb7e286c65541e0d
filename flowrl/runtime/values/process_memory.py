"""How much memory a process has: resident, that of the processes that it has started, and on its device."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

CHILDREN = 5.0  # seconds after which the processes that one has started are looked for again
_PAGE = resource.getpagesize()
_PEAK = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of ru_maxrss


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process: ``ProcessMemory(resident=410_000_000, peak=520_000_000)``.

    ``children`` are those of processes that it has started, such as an engine's. ``device`` is what torch has allocated
    on the device now, ``device_reserved`` what it holds, and ``device_peak`` the most that was ever allocated; None
    where there is no device in use.
    """

    resident: int
    peak: int
    children: int = 0
    device: int | None = None
    device_reserved: int | None = None
    device_peak: int | None = None

    def to_json(self) -> dict[str, int]:
        """Return what is known as plain data."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "children"} | (
            {"children": self.children} if self.children else {}
        )


class MemoryProbe:
    """Looks at the memory of this process; with ``children`` also at that of the processes that it has started."""

    def __init__(self, *, children: bool = True) -> None:
        self._children, self._looked = list[int](), -inf if children else inf

    def look(self) -> ProcessMemory:
        """Return how much memory the process has now."""
        now = time.monotonic()
        if now - self._looked > CHILDREN:
            self._children, self._looked = _descendants(os.getpid()), now
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK
        return ProcessMemory(_resident("self") or peak, peak, sum(map(_resident, self._children)), *_of_device())


def _resident(pid: int | str) -> int:
    """Return the resident bytes of a process; 0 where it is gone, or where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _descendants(pid: int) -> list[int]:
    found = list[int]()
    asked = [pid]
    while asked:
        for task in Path(f"/proc/{asked.pop()}/task").glob("*/children"):
            try:
                found += (children := [int(word) for word in task.read_text().split()])
            except OSError:
                continue
            asked += children
    return found


def _of_device() -> tuple[int, int, int] | tuple[()]:
    """Return what torch has allocated on the device of this process, where torch is loaded and uses one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    cuda = torch.cuda
    return cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated()
