"""A checkpoint of a run that is taken for something else than going on with it: the one that is asked for, whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import UsageError
from . import checkpoint_folder as checkpoints
from .damage import damage


def chosen_checkpoint(run: Path, record: Mapping[str, Any], which: str) -> Path:
    """Return the checkpoint of a run that was asked for, ``last``, ``best`` or its number, whole. Raises UsageError."""
    folder = run / "checkpoints"
    have = [path.name for path in checkpoints.numbered(folder)] if folder.is_dir() else []
    if which in ("last", "best"):
        found = {"last": checkpoints.latest, "best": checkpoints.best}[which](folder) if have else None
    else:
        found = folder / f"{int(which):06d}" if which.isdecimal() else None
    if found is None or found.name not in have:
        fix = "Runs have a best checkpoint with --keep-best METRIC." if which == "best" else "Name one of these."
        raise UsageError(f"{run} has no checkpoint '{which}'.", have=have, fix=fix)
    wrong, _ = damage(found, record.get("id"))
    if wrong:
        raise UsageError(f"checkpoint {found.name} is damaged: {wrong}.", have=have, fix="Take another one.")
    return found


def begun_with(folder: str | Path | None) -> str:
    """Return which checkpoint that is, for the record of a run that begins with it; empty without one.

    Raises UsageError where the folder holds none.
    """
    if folder is None:
        return ""
    if not (Path(folder) / "manifest.json").is_file():
        raise UsageError(
            f"--checkpoint {folder}: that is no folder of a checkpoint.",
            fix="Write flowrl run RUN --checkpoint best, last or a number, or name a folder of RUN/checkpoints.",
        )
    wrong, _ = damage(Path(folder), None)
    if wrong:
        raise UsageError(f"--checkpoint {folder} is damaged: {wrong}.", fix="Take another one.")
    return f"{Path(folder).name} of {checkpoints.load_manifest(Path(folder), reopened=True).get('run') or 'a run'}"
