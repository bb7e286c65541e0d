"""Where processes meet: a file in a folder that their user alone can read. No port is opened for it.

A store of PyTorch that listens asks nobody who they are; whoever wrote another address into it would be given weights.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

_dist: Any = dist  # it has the stores without exporting them
_FOLDER = ".meetings"
SECONDS_TO_SEE = 10.0


def new_meeting(folder: Path) -> str:
    """Return the name of a file in the folder of a run at which processes can meet; all of them have to reach it."""
    inside = folder / _FOLDER
    inside.mkdir(mode=0o700, parents=True, exist_ok=True)
    inside.chmod(0o700)
    return str(inside / secrets.token_hex(8))


def leave_sign(folder: Path) -> str:
    """Leave a file in the folder of a run, by which processes of other machines know that it is the same; returns its
    name."""
    sign = Path(new_meeting(folder))
    sign.touch(mode=0o600)
    return str(sign)


def sees(sign: str, seconds: float = SECONDS_TO_SEE) -> bool:
    """Whether this process finds what :func:`leave_sign` has left, at the latest after so many seconds: a file system
    of several machines may tell of a new file late."""
    until = time.monotonic() + seconds
    while not Path(sign).exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def forget_meetings(folder: Path) -> None:
    """Remove what is left of meetings in the folder of a run."""
    inside = folder / _FOLDER
    with suppress(OSError):
        for file in inside.iterdir():
            with suppress(OSError):
                file.unlink()
        inside.rmdir()


def meet(meeting: str, size: int) -> Any:
    """Return the store of a meeting of ``size`` processes; the last of them to forget it removes the file.

    Raises RuntimeError where its folder is not there.
    """
    return _dist.FileStore(meeting, size)


def arrived(store: Any, names: list[str], seconds: float) -> bool:
    """Whether all of these are told within so many seconds."""
    until, pause = time.monotonic() + seconds, 0.001
    while not store.check(names):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True
