"""Whose a run folder is: one process at a time writes there, and a lock says which one on which host."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from ...errors import ResumeError, UsageError, shown
from .disk import remove, write_file, writing

NAME = "run.lock"
PATIENCE = 5.0  # seconds that others may look at a lock; one that is stopped while it does keeps nobody out
_HELD: set[Path] = set()  # by this process; one that has replaced itself by another program holds nothing any more
_TAKING = threading.Lock()  # one thread of this process: what another one has just taken is in _HELD


class Lock:
    """Keeps a folder to this process until it is released. Raises UsageError while another live process has it.

    The file holds ``{"host": "node7", "machine": "1f0c...", "space": "pid:[4026531836]", "pid": 4711, "began":
    "8b2e.../184467", "since": 1764000000.0}``: the number of a process may be given again, its start on one boot of a
    host is not. What a process that is gone has left is taken over. Of another host or container nothing can be known:
    its lock counts until ``unlock`` says that its process is gone. :meth:`check` ends a run of which that was not so.
    """

    def __init__(self, folder: Path, *, unlock: bool = False) -> None:
        self._file = (folder / NAME).absolute()
        self._mine = {**_here(), "pid": os.getpid(), "began": began(os.getpid()), "since": time.time()}
        self.taken_from = ""  # who was said to be gone
        self.lost = False
        with _TAKING, _alone(self._file):
            while not self._made():
                holder = _holder(self._file)
                state = _state(holder, self._file)
                if state == "live" or (state == "unknown" and not unlock):
                    raise in_use(folder, holder or {}, visible=state == "live")
                if self._moved_away(holder) and state == "unknown" and holder is not None:
                    self.taken_from = _who(holder)
            self._known = self._stat()
            _HELD.add(self._file)

    def check(self) -> None:
        """Raise ResumeError where another process has been given the folder, as if this one were gone."""
        if self._stat() == self._known and self._known is not None:
            return
        if self._stat() is None:
            self._made()  # somebody has removed the file
        holder = _holder(self._file)
        if holder != self._mine:
            self.lost = True
            raise ResumeError(
                f"{shown(str(self._file.parent))} was given to {_who(holder or {})} while this run was writing "
                "there; this run has stopped.",
                fix="Let that one go on. --unlock is for a folder whose process is gone.",
            )
        self._known = self._stat()

    def release(self) -> None:
        """Let others have the folder."""
        _HELD.discard(self._file)
        with suppress(OSError, UsageError), _alone(self._file):
            if _holder(self._file) == self._mine:
                self._file.unlink()

    def _made(self) -> bool:
        """Make the lock, whole and at once; False where there is one."""
        part = self._file.with_name(f"{NAME}.{uuid.uuid4().hex}")
        try:
            write_file(part, [json.dumps(self._mine).encode()])
            with writing(self._file):
                try:
                    os.link(part, self._file)
                except FileExistsError:
                    return False
                except OSError:  # a file system without links
                    return self._written()
            return True
        finally:
            remove(part)

    def _written(self) -> bool:
        try:
            with self._file.open("x") as file:
                json.dump(self._mine, file)
        except FileExistsError:
            return False
        return True

    def _moved_away(self, holder: Mapping[str, Any] | None) -> bool:
        """Take away the lock of a holder that is gone, and put back what was another one by then."""
        aside = self._file.with_name(f"{NAME}.{uuid.uuid4().hex}")
        try:
            self._file.rename(aside)
        except FileNotFoundError:
            return False
        if _holder(aside) != holder:
            with suppress(OSError):
                os.link(aside, self._file)
        remove(aside)
        return True

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def in_use(folder: Path, holder: Mapping[str, Any], *, visible: bool = True) -> UsageError:
    """The error of a second run in the same folder; ``visible``: whether its process can be seen from here."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
    if visible:
        return UsageError(
            f"{folder} is in use: {_who(holder)} has been running there since {when}.",
            fix="Wait until it has ended, stop it, or name another folder with --out.",
        )
    return UsageError(
        f"{folder} is in use: {_who(holder)} has been running there since {when}, which cannot be seen from here; "
        f"nothing was written there for {_age(folder)}.",
        fix="Wait until it has ended, or name another folder with --out. If that process is gone, add --unlock.",
    )


def holder_of(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Who has the lock of a folder, and whether that process is ``live``, ``gone``, or ``unknown`` from here."""
    holder = _holder(folder / NAME)
    return holder, _state(holder, (folder / NAME).absolute())


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, as by SIGSTOP."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def began(pid: int) -> str:
    """When a process began, as a text that no other process of any boot has; empty where there is none."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else f"{_boot()}/{fields[19]}"
    if Path("/proc/self/stat").exists():
        return ""
    said = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return said.stdout.strip()


def _who(holder: Mapping[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"


def _age(folder: Path) -> str:
    """How long ago something was written in a folder: ``3 minutes``."""
    seconds = time.time() - max((p.stat().st_mtime for p in folder.glob("*.jsonl")), default=folder.stat().st_mtime)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


def _holder(file: Path) -> dict[str, Any] | None:
    """Who has a lock; None where nobody has it, or what is there is no lock. Raises UsageError for one kept secret."""
    try:
        said = json.loads(file.read_text())
    except PermissionError:
        raise UsageError(
            f"{file} cannot be read: another user's run may be writing there.",
            fix="Name another folder with --out.",
        ) from None
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and {"host", "space", "pid", "began"} <= set(said) else None


def _here() -> dict[str, str]:
    """The host, and what tells the processes of its containers apart."""
    machine = space = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return {"host": platform.node(), "machine": machine, "space": space}


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _state(holder: Mapping[str, Any] | None, file: Path) -> Literal["live", "gone", "unknown"]:
    """Whether the process of a lock lives. A host is told by its boot, as hosts and containers may share a name."""
    if holder is None:
        return "gone"  # torn
    boot = holder["began"].partition("/")[0]
    here = _here()
    if holder["host"] != here["host"]:
        return "unknown"
    if boot != _boot():  # it was started anew since then, or another one of the same name
        same = bool(here["machine"]) and holder.get("machine", here["machine"]) == here["machine"]
        return "gone" if same and holder["space"] == here["space"] else "unknown"
    if holder["space"] != here["space"]:
        return "unknown"
    if holder["pid"] == os.getpid() and holder["began"] == began(os.getpid()):
        return "live" if file in _HELD else "gone"
    if holder["began"] and began(holder["pid"]) == holder["began"]:
        return "live"
    return "unknown" if _hidden(holder["pid"]) else "gone"


def _hidden(pid: int) -> bool:
    """Whether there is a process of that number of which nothing can be seen, as of other users on some hosts."""
    if began(pid):
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Have nobody else look at a lock or change it inside the block, on file systems that can tell."""
    try:
        import fcntl
    except ImportError:  # not on Unix
        yield
        return
    handle, until = os.open(file.parent, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
