"""A checkpoint: one folder that appears whole or not at all, of safetensors and JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..batch import Batch, Column
from ..errors import ResumeError
from .group import Group
from .remote import Remote, RemoteColumn
from .state_files import StateFiles, files_of, read_record, write_record, write_shards

FORMAT = 2
KEEP = 2


def save(
    folder: Path,
    manifest: Mapping[str, Any],
    workers: Mapping[str, Any],
    live: Mapping[int, Any],
    write_rows: Callable[[Any, Path], Mapping[str, Any]] | None = None,
) -> Path:
    """Write ``folder/NNNNNN`` with the state of workers and the live values; older ones than two are taken away.

    The files of a worker that has not changed since the last checkpoint are linked, not written again. ``write_rows``
    has rows that lie on ranks written there.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    before = latest(folder)
    number = int(before.name) + 1 if before else 0
    target, made = folder / f"{number:06d}", folder / f".{number:06d}.part"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    stamps: dict[str, int] = {}
    old = _read(before)["stamps"] if before else {}
    for name, worker in workers.items():
        stamps[name] = worker.stamp
        if before and old.get(name) == worker.stamp and (before / f"{name}.json").exists():
            for file in files_of(before, name):
                _same_file(file, made / file.name)
        elif isinstance(worker, Group):
            worker.save_state(made, name)
        else:
            shards, record = worker.state_shards()
            write_shards(made, name, 0, shards)
            write_record(made, name, record)
    here = {i: v for i, v in live.items() if not isinstance(v, (Remote, RemoteColumn))}
    tensors, values = _packed(here)
    for index, value in live.items():
        if index not in here:
            assert write_rows is not None, "rows that lie on ranks are written there"
            meta = write_rows(value, made / f"live.{index}.safetensors")
            values[str(index)] = {"rows": meta, "column": isinstance(value, RemoteColumn)}
    distinct, same = _distinct(tensors)
    if distinct:
        save_file(distinct, made / "live.safetensors")
    full = {"format": FORMAT, **manifest, "stamps": stamps, "live": values, "live_same": same}
    (made / "manifest.json").write_text(json.dumps(full, indent=1))
    for file in made.iterdir():
        _sync(file)
    _sync(made)
    made.rename(target)
    _sync(folder)
    for stale in _all(folder)[:-KEEP]:
        shutil.rmtree(stale)
    return target


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder."""
    found = _all(folder)
    return found[-1] if found else None


def end(folder: Path, progress: Mapping[str, Any]) -> None:
    """Have the newest checkpoint, taken at the end of a program's last loop, stand for the end of the program too.

    ``progress`` is what a manifest of the next program's start would say; :func:`reopen` takes it back.
    """
    newest = latest(folder)
    assert newest is not None, "a checkpoint was taken at the end of the loop"
    _rewrite(newest, {**_read(newest), "ended": dict(progress)})


def reopen(checkpoint: Path) -> bool:
    """Have a checkpoint be again what it was at the end of its program's last loop; False where it never was that."""
    manifest = _read(checkpoint)
    if manifest.pop("ended", None) is None:
        return False
    _rewrite(checkpoint, manifest)
    return True


def remove(checkpoint: Path) -> None:
    """Take a checkpoint away: its manifest first, so that it is never found in part."""
    (checkpoint / "manifest.json").unlink()
    shutil.rmtree(checkpoint)


def _read(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())


def _rewrite(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Put another manifest in the place of a checkpoint's own, at once."""
    part = checkpoint / "manifest.part"
    part.write_text(json.dumps(manifest, indent=1))
    _sync(part)
    part.replace(checkpoint / "manifest.json")
    _sync(checkpoint)


def load_manifest(checkpoint: Path) -> dict[str, Any]:
    """Its manifest; ``program`` is None where that has ended. Raises ResumeError for a format that is unknown."""
    manifest = _read(checkpoint)
    if manifest.get("format") != FORMAT:
        raise ResumeError(
            f"checkpoint {checkpoint} has format {manifest.get('format')}; this flowrl reads {FORMAT}.",
            fix="Resume with the flowrl that wrote it.",
        )
    if "ended" in manifest:
        return {**manifest, **manifest["ended"], "program": None}
    return manifest


def load_worker(checkpoint: Path, name: str, worker: Any) -> None:
    """Give a worker its state back, on whichever ranks it is now."""
    if isinstance(worker, Group):
        worker.load_state(checkpoint, name)
        return
    with StateFiles(checkpoint, name) as files:
        worker.load_state_shards(files, read_record(checkpoint, name))


def load_live(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[int, Any]:
    """The values that the program held."""
    tensors = _tensors(checkpoint / "live.safetensors", manifest["live_same"])
    return {
        int(i): _rows(checkpoint / f"live.{i}.safetensors", said) if "rows" in said else _unpacked(i, said, tensors)
        for i, said in manifest["live"].items()
    }


def _rows(file: Path, said: Mapping[str, Any]) -> Any:
    """Rows that a rank has written."""
    batch = Batch.from_tensors(_tensors(file, {}), said["rows"])
    return RemoteColumn(batch.keys, Remote.drawn(batch).columns["value"]) if said["column"] else batch


def _tensors(file: Path, same: Mapping[str, str]) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors = load_file(file) if file.exists() else {}
    return tensors | {name: tensors[first] for name, first in same.items()}


def _distinct(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors on the CPU that share no memory, and the names of those that are another one."""
    found: dict[str, Any] = {}
    same: dict[str, str] = {}
    first: dict[Any, str] = {}
    stores: set[int] = set()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            same[name] = first[place]
            continue
        first[place] = name
        store = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().cpu().contiguous()
        found[name] = tensor.clone() if store in stores else tensor
        stores.add(store)
    return found, same


def _packed(live: Mapping[int, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for index, value in live.items():
        if isinstance(value, Column):
            values[str(index)] = {"column": value.to_record()}
        elif isinstance(value, Batch):
            tensors |= {f"{index}/{n}": t for n, t in value.tensors().items()}
            values[str(index)] = {"batch": value.meta()}
        else:
            values[str(index)] = {"metrics" if isinstance(value, dict) else "plain": value}
    return tensors, values


def _unpacked(index: str, said: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    if "column" in said:
        return Column.from_record(said["column"])
    if "batch" in said:
        mine = {n.partition("/")[2]: t for n, t in tensors.items() if n.partition("/")[0] == index}
        return Batch.from_tensors(mine, said["batch"])
    if "metrics" in said:
        from ..graph.op import Metrics

        return Metrics(said["metrics"])
    return said["plain"]


def _all(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("[0-9]*") if (p / "manifest.json").exists())


def _same_file(there: Path, here: Path) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(there, here)
    except OSError:
        shutil.copy2(there, here)


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
