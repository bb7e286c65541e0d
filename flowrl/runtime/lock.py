"""Whose a run folder is: one process at a time writes there, and a lock says which one on which host."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import UsageError

NAME = "run.lock"


class Lock:
    """Keeps a folder to this process until it is released. Raises UsageError while another live process has it.

    The file holds ``{"host": "node7", "space": "pid:[4026531836]", "pid": 4711, "began": "8b2e.../184467", "since":
    1764000000.0}``: the number of a process may be given again, its start on one boot of a host is not. What a process
    that is gone has left is taken over; of another host or container nothing can be known, so its lock counts until
    somebody removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / NAME
        self._mine = {**_here(), "pid": os.getpid(), "began": began(os.getpid()), "since": time.time()}
        with _alone(self._file):
            holder = _holder(self._file)
            if holder is not None and _is_live(holder):
                raise in_use(folder, holder)
            part = self._file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self._mine))
            part.replace(self._file)

    def release(self) -> None:
        """Let others have the folder."""
        with suppress(OSError), _alone(self._file):
            if _holder(self._file) == self._mine:
                self._file.unlink()


def in_use(folder: Path, holder: Mapping[str, Any]) -> UsageError:
    """The error of a second run in the same folder."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
    gone = "" if _is_here(holder) else f" If that process is gone, remove {folder / NAME}."
    return UsageError(
        f"{folder} is in use: process {holder['pid']} on {holder['host']} has been running there since {when}.",
        fix=f"Wait until it has ended, stop it, or name another folder with --out.{gone}",
    )


def began(pid: int) -> str:
    """When a process began, as a text that no other process of any boot has; empty where there is none."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else f"{boot}/{fields[19]}"
    if Path("/proc/self/stat").exists():
        return ""
    said = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return said.stdout.strip()


def _holder(file: Path) -> dict[str, Any] | None:
    """Who has a lock; None where nobody has it, or what is there is no lock."""
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and {"host", "space", "pid", "began"} <= set(said) else None


def _here() -> dict[str, str]:
    """The host, and what tells the processes of its containers apart."""
    try:
        return {"host": platform.node(), "space": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": platform.node(), "space": ""}


def _is_here(holder: Mapping[str, Any]) -> bool:
    return {"host": holder["host"], "space": holder["space"]} == _here()


def _is_live(holder: Mapping[str, Any]) -> bool:
    if not _is_here(holder):
        return True
    return bool(holder["began"]) and began(holder["pid"]) == holder["began"]


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Have nobody else look at a lock or change it inside the block, on file systems that can tell."""
    try:
        import fcntl
    except ImportError:  # not on Unix
        yield
        return
    handle = os.open(file.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
