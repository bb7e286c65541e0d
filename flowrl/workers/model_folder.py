"""Which folder of a saved model a name means, where it means one and is no name of the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelError, near
from ..graph.tracing.trace_records import HandleLike
from .model_options import Model


def model_folder(name: str) -> str:
    """Return the name, or the folder that it means. Raises ModelError for a path where no saved model is."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = [p.parent.name for p in sorted(path.glob("*/config.json"))]
            raise ModelError(
                f"The folder '{name}' holds no config.json, so it is no saved model.",
                have=inside or None,
                fix=f"Write {path / inside[0]}." if inside else "Name the folder of a saved model.",
            )
        return str(path)
    looks_local = is_path(name) or name.count("/") > 1 or path.suffix in (".safetensors", ".bin")
    if not looks_local and "\\" not in name:
        return name
    raise ModelError(f"There is no folder '{name}'.", fix=folder_fix(name))


def is_path(name: str) -> bool:
    """Whether a name can only be that of a folder: ``/models/actor``, ``./actor``, ``../actor``, ``~/actor``."""
    return name.startswith((".", "/", "~"))


def missing_folders(handles: Iterable[HandleLike]) -> list[ModelError]:
    """Return what is wrong with the paths that workers name as their models; names of the hub are not asked for."""
    found: list[ModelError] = []
    for handle in handles:
        model = handle.arguments.get("model")
        name = model.name if isinstance(model, Model) else str(model) if isinstance(model, (str, Path)) else None
        if name is None or not is_path(name):
            continue
        try:
            model_folder(name)
        except ModelError as error:
            error.at = handle.model_at
            found.append(error)
    return found


def folder_fix(name: str, otherwise: str = "") -> str:
    """Return the fix for a model that is not there: the folder that was probably meant; else ``otherwise``."""
    path = Path(name).expanduser()
    if path.is_dir():
        return "Look at the files of that folder."
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    beside = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    missed = path.relative_to(folder).parts[0] if path != folder else path.name
    meant = near(missed, beside)
    if meant:
        return f"Did you mean the folder {folder / meant}?"
    return otherwise or "Name a folder with a saved model, or a model of the hub that this machine can reach."
