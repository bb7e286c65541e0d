"""Which checkpoints of a run are whole, and what is wrong with the others. Nothing is changed here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import ResumeError, shown
from ..disk import Checksum, checksum
from ..jsonl import unreadable
from ..run_record import without_checksum
from .checkpoint_folder import MANIFEST, numbered

THREADS = 8


@dataclass(frozen=True)
class Survey:
    """What was found: ``Survey(Path("checkpoints/000001"), {Path("checkpoints/000002"): "its ... is missing"})``.

    ``whole`` is the newest whole checkpoint, None where a run has none yet; ``damaged`` are those after it, the newest
    first; ``unchecked``: that one was written by an older flowrl, without checksums.
    """

    whole: Path | None
    damaged: Mapping[Path, str]
    unchecked: bool = False

    def lines(self) -> list[str]:
        """What there is to be said of it."""
        found = [
            f"checkpoint {path.name} is damaged: {what}; it is put aside as {path.name}.damaged"
            for path, what in self.damaged.items()
        ]
        if self.damaged and self.whole is not None:
            found[-1] += f", and checkpoint {self.whole.name} is taken in its place"
        if self.unchecked and self.whole is not None:
            found.append(
                f"checkpoint {self.whole.name} is of an older flowrl, without checksums: it is taken unchecked"
            )
        return found


def survey(
    out: Path,
    record: Mapping[str, Any],
    *,
    lacks: Callable[[Mapping[str, Any]], str] = lambda manifest: "",
    before: Path | None = None,
) -> Survey:
    """Find the newest whole checkpoint of a run, of those that are older than ``before``.

    ``record`` is the run's; ``lacks`` says what outside of a checkpoint is needed to go on from it and is lost. Raises
    ResumeError where checkpoints cannot be read, or none of those that the run has had is whole.
    """
    folder = out / "checkpoints"
    try:
        there = numbered(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise unreadable(folder, "it is a link to nothing") from None
        there = []
    except OSError as error:
        raise unreadable(folder, error) from None
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(there):
        if before is not None and int(checkpoint.name) >= int(before.name):
            continue
        what, unchecked = damage(checkpoint, record.get("id"), lacks)
        if not what:
            return Survey(checkpoint, damaged, unchecked)
        damaged[checkpoint] = what
    if damaged:
        each = "; ".join(f"of {path.name}, {what}" for path, what in damaged.items())
        raise ResumeError(
            f"no checkpoint of {shown(str(out))} is whole: {each}. Nothing was changed.",
            fix="Bring the files back, or start anew with --overwrite.",
        )
    if record.get("checkpoints") and before is None:
        raise ResumeError(
            f"the run in {shown(str(out))} has taken checkpoints, and none of them is there. Nothing was changed.",
            fix="Bring the folder checkpoints back, or start anew with --overwrite.",
        )
    return Survey(None, damaged)


def damage(
    checkpoint: Path, run: str | None, lacks: Callable[[Mapping[str, Any]], str] = lambda manifest: ""
) -> tuple[str, bool]:
    """What is wrong with a checkpoint, empty where nothing is; and whether it has no checksums to tell by."""
    if not checkpoint.is_dir():
        return "it is no folder", False
    try:
        manifest = without_checksum((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"it has no {MANIFEST}", False
    except OSError as error:
        return f"its {MANIFEST} cannot be read ({error.strerror})", False
    except ValueError as error:
        return f"its {MANIFEST} {error}", False
    if run is not None and manifest.get("run", run) != run:
        return f"its {MANIFEST} is of another run", False
    if "files" not in manifest:
        return lacks(manifest), True
    files = {n: Checksum(*said) for n, said in manifest["files"].items()}
    return _damaged_file(checkpoint, files) or lacks(manifest), False


def damaged_files(checkpoint: Path, worker: str) -> str:
    """What is wrong with the files of one worker in a checkpoint; empty where nothing is, or nothing can be told."""
    try:
        files = without_checksum((checkpoint / MANIFEST).read_bytes()).get("files", {})
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} {error}"
    mine = {n: Checksum(*said) for n, said in files.items() if n == f"{worker}.json" or _is_part(n, worker)}
    return next(filter(None, (_wrong(checkpoint / name, said) for name, said in mine.items())), "")


def _is_part(name: str, worker: str) -> bool:
    return name.startswith(f"{worker}.") and name[len(worker) + 1 :].partition(".")[0].isdigit()


def _damaged_file(checkpoint: Path, files: Mapping[str, Checksum]) -> str:
    """What is wrong with the first damaged file, and how many others are."""
    try:
        strange = sorted(n for n in os.listdir(checkpoint) if n not in (*files, MANIFEST) and not n.startswith("."))
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    strange = [n for n in strange if not n.endswith(".part")]
    with ThreadPoolExecutor(min(THREADS, max(1, len(files)))) as pool:
        found = list(filter(None, pool.map(lambda item: _wrong(checkpoint / item[0], item[1]), files.items())))
    if not found:
        return f"it holds {strange[0]}, which is none of its files" if strange else ""
    return found[0] + (f", and {len(found) - 1} more of its files are damaged" if found[1:] else "")


def _wrong(file: Path, said: Checksum) -> str:
    """What is wrong with a file."""
    try:
        size = file.stat().st_size
        if file.is_dir():
            return f"its {file.name} is a folder"
        if size != said.bytes:
            return f"its {file.name} has {size} bytes of {said.bytes}"
        found = checksum(file)
    except FileNotFoundError:
        return f"its {file.name} is missing"
    except OSError as error:
        return f"its {file.name} cannot be read ({error.strerror})"
    if found == said:
        return ""
    return f"its {file.name} has other contents than were written"
