"""The folder of a run: taken for this process, empty for a new run, or as it was left for one that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...errors import UsageError
from ...workers.user_code.rows_in_progress import NAME as NOTES
from .run_lock import NAME, Lock


def take_folder(out: Path, *, resume: bool, overwrite: bool, unlock: bool = False) -> Lock:
    """Make a folder ready for a run, and keep it to this process until the lock is released.

    Raises UsageError where it is in use, holds something else, or holds a run that nobody said to go on with or to
    write over. ``unlock`` says that a process on another host, which has its lock there, is gone.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; a run needs a folder.", fix="Name another folder with --out.")
    a_run = (out / NAME).exists() or (out / "run.json").exists()
    if not (out / NAME).exists():  # in a folder that is somebody else's not even a lock is written
        _check_contents(out, resume=resume, overwrite=overwrite, a_run=a_run)
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is there already keeps its mode
    except OSError as error:
        what = f"{out} cannot be the folder of a run: {error.strerror}."
        raise UsageError(what, fix="Name another folder with --out.") from None
    lock = Lock(out, unlock=unlock)
    try:
        _check_contents(out, resume=resume, overwrite=overwrite, a_run=a_run)
        if not resume:
            for inside in out.iterdir():
                _remove(inside)
    except BaseException:
        lock.release()
        raise
    return lock


def _check_contents(out: Path, *, resume: bool, overwrite: bool, a_run: bool) -> None:
    there = [p.name for p in out.iterdir() if not p.name.startswith((NAME, NOTES))] if out.exists() else []
    if resume:
        if not {"run.json", "checkpoints"} & set(there):  # of a lost run.json a checkpoint has a copy
            raise UsageError(
                f"--resume: {out} holds no run.", fix="Name the folder of a run with --out, or leave out --resume."
            )
    elif there and not a_run:
        resumes = "checkpoints" in there
        what = f"{out} is not empty and {'has no run.json' if resumes else 'holds no run'}; it is left as it is."
        raise UsageError(
            what, fix=("Go on with --resume, or name" if resumes else "Name") + " another folder with --out."
        )
    elif there and not overwrite:
        raise UsageError(
            f"{out} is not empty.",
            fix="Go on with --resume, start anew with --overwrite, or name another folder with --out.",
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.name != NAME:
        path.unlink()
