"""A folder in which a run is done again from a checkpoint: what it holds of the run, and where it begins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError, shown
from .checkpoints import checkpoint_folder as checkpoint
from .checkpoints.damage import damage
from .recorder import STREAMS
from .replay_record import Replay, write_replay
from .run_record import write_record


@dataclass(frozen=True)
class Begin:
    """Where a replay begins: a checkpoint, None for the start of the run; the program, and its first step."""

    folder: Path | None
    program: int
    step: int


def prepare_replay(run: Path, out: Path, record: Mapping[str, Any], replay: Replay, program: int, step: int) -> Begin:
    """Make ``out`` a copy of a run as it was at its newest whole checkpoint before a step of a program.

    Nothing of ``run`` changes. Weights are linked where the file system allows that. Raises UsageError where ``out``
    holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{shown(str(out))} is not empty.", fix="Name another folder with --keep.")
    begin = _checkpoint_before(run, record, program, step)
    (out / "checkpoints").mkdir(parents=True)
    if begin.folder is not None:
        copy = out / "checkpoints" / begin.folder.name
        shutil.copytree(begin.folder, copy, copy_function=_link)
        if begin.step:
            checkpoint.reopen(copy)
    names = {f"{stream}.jsonl" for stream in STREAMS} - {"events.jsonl"}
    for file in (*(run / name for name in names), *run.glob("journal*.jsonl")):
        if file.exists():
            shutil.copyfile(file, out / file.name)
    write_record(out, {**record, "status": "interrupted", "checkpoints": begin.folder is not None})
    write_replay(out, replay)
    return begin


def _checkpoint_before(run: Path, record: Mapping[str, Any], program: int, step: int) -> Begin:
    folder = run / "checkpoints"
    best = Begin(None, 0, 0)
    for path in checkpoint.numbered(folder) if folder.exists() else ():
        if damage(path, record.get("id"))[0]:
            continue
        manifest = checkpoint.load_manifest(path, reopened=True)
        places = [Begin(path, manifest["stage"], manifest["program"]["steps"] if manifest["program"] else 0)]
        if "ended" in manifest:
            places.append(Begin(path, manifest["ended"]["stage"], 0))
        for place in places:
            if (best.program, best.step) < (place.program, place.step) <= (program, step):
                best = place
    return best


def _link(source: str, target: str) -> str:
    with suppress(OSError):
        os.link(source, target)
        return target
    return shutil.copyfile(source, target)
