"""Which runs lie below a folder, and how the page names them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError, shown

DEEPEST = 4  # folders below the one that was named
INSIDE = ("checkpoints", "model", "best", "not_finite")  # of a run, where no run lies


@dataclass(frozen=True)
class FoundRun:
    """A run as the page knows it: ``FoundRun("0c2f81d6a3b5", "sweep/first", Path("runs/sweep/first"))``."""

    id: str
    label: str
    folder: Path


def find_runs(folders: Sequence[Path]) -> list[FoundRun]:
    """The runs in and below ``folders``, in the order of their paths. Two of one name have labels that differ.

    Raises UsageError for a folder that is not there.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder.", fix="Name the folder of a run, or one that holds runs.")
    found = {run.resolve(): _short(run, folder) for folder in folders for run in _below(folder)}
    labels = _told_apart(found.items())
    return [FoundRun(run_id(path), labels[path], path) for path in sorted(found)]


def run_id(folder: Path) -> str:
    """The name of a run in addresses of the page, and of its index: it is the same as long as the folder is."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]


def holds_a_run(folder: Path) -> bool:
    """Whether a run was recorded in this folder itself."""
    return (folder / "run.json").is_file() or (folder / "checkpoints").is_dir()


def _below(folder: Path, depth: int = 0) -> Iterator[Path]:
    if holds_a_run(folder):
        yield folder
    if depth == DEEPEST:
        return
    try:
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in map(Path, inside):
        if not path.name.startswith(".") and path.name not in INSIDE:
            yield from _below(path, depth + 1)


def _short(run: Path, folder: Path) -> str:
    below = os.path.relpath(run, folder)
    return (run.resolve().name or "/") if below == "." else below


def _told_apart(runs: Iterable[tuple[Path, str]]) -> dict[Path, str]:
    """Labels by path: the short one, or the path as a user would type it where two runs share the short one."""
    listed = list(runs)
    count = Counter(label for _, label in listed)
    return {path: label if count[label] == 1 else shown(str(path)) for path, label in listed}
