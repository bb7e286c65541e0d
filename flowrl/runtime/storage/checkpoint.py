"""A checkpoint: one folder that appears whole or not at all, of safetensors and JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...batch import Batch, Column
from ...errors import ResumeError
from ..distributed.worker_group import WorkerGroup
from ..values.remote_batch import Remote, RemoteColumn
from .disk import Checksum, checksum, replace_file, sync, write_tensors, writing
from .disk import remove as take_away
from .run_record import with_checksum, without_checksum
from .state_files import StateFiles, files_of, read_record, write_record, write_shards

FORMAT = 2
KEEP = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"\d{6,}")
_OURS = re.compile(r"\.?(\d{6,})(\.(part|gone|damaged))?")

WriteRows = Callable[[Any, Path], tuple[Mapping[str, Any], Mapping[str, Checksum]]]


def save(
    folder: Path,
    manifest: Mapping[str, Any],
    workers: Mapping[str, Any],
    live: Mapping[int, Any],
    write_rows: WriteRows | None = None,
) -> Path:
    """Write ``folder/NNNNNN`` with the state of workers and the live values; older ones than two are taken away.

    The files of a worker that has not changed since the last checkpoint but one are links to those of then: the two
    that are kept share none, so that damage to a file is damage to one of them. ``write_rows`` has rows that lie on
    ranks written there. The manifest has the checksums of all files, and of itself. Raises DiskError where the disk
    does not take it: then nothing of it stays.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    before = _all(folder)[-2:-1]
    ours = {p: int(found[1]) for p in folder.iterdir() if (found := _OURS.fullmatch(p.name))}
    number = max(ours.values(), default=-1) + 1
    target, made = folder / f"{number:06d}", folder / f".{number:06d}.part"
    for left in ours:
        if left.name.startswith("."):  # of a checkpoint that was not finished, or not taken away to its end
            take_away(left)
    try:
        with writing(made):
            made.mkdir()
        _write(made, before[0] if before else None, manifest, workers, live, write_rows)
        with writing(target):
            sync(made)
            made.rename(target)
            sync(folder)
    except BaseException:
        take_away(made)
        raise
    kept = _all(folder)[-KEEP:]
    for stale in ours:
        if stale not in kept and not stale.name.startswith("."):
            remove(stale)
    return target


def _write(
    made: Path,
    before: Path | None,
    manifest: Mapping[str, Any],
    workers: Mapping[str, Any],
    live: Mapping[int, Any],
    write_rows: WriteRows | None,
) -> None:
    """Write the files of a checkpoint, its manifest last."""
    stamps: dict[str, int] = {}
    files: dict[str, Checksum] = {}
    past: dict[str, Any] = {"stamps": {}}
    if before is not None:
        with suppress(OSError, ValueError):  # what is damaged by now is written anew
            past = _read(before)
    for name, worker in workers.items():
        stamps[name] = worker.stamp
        if before and past["stamps"].get(name) == worker.stamp and (before / f"{name}.json").exists():
            files |= _linked(before, made, name, past.get("files", {}))
        elif isinstance(worker, WorkerGroup):
            files |= worker.save_state(made, name)
        else:
            shards, record = worker.state_shards()
            files |= write_shards(made, name, 0, shards) | write_record(made, name, record)
    here = {i: v for i, v in live.items() if not isinstance(v, (Remote, RemoteColumn))}
    tensors, values = _packed(here)
    for index, value in live.items():
        if index not in here:
            assert write_rows is not None, "rows that lie on ranks are written there"
            meta, found = write_rows(value, made / f"live.{index}.safetensors")
            files |= found
            values[str(index)] = {"rows": meta, "column": isinstance(value, RemoteColumn)}
    distinct, same = _distinct(tensors)
    if distinct:
        files["live.safetensors"] = write_tensors(made / "live.safetensors", distinct)
    _write_manifest(
        made,
        {"format": FORMAT, **manifest, "stamps": stamps, "live": values, "live_same": same, "files": files},
    )


def latest(folder: Path, but: Collection[Path] = ()) -> Path | None:
    """The newest checkpoint in a folder, not one of ``but``. Nothing is said of whether it is damaged."""
    found = [p for p in _all(folder) if p not in but]
    return found[-1] if found else None


def end(folder: Path, progress: Mapping[str, Any]) -> None:
    """Have the newest checkpoint, taken at the end of a program's last loop, stand for the end of the program too.

    ``progress`` is what a manifest of the next program's start would say; :func:`reopen` takes it back.
    """
    newest = latest(folder)
    assert newest is not None, "a checkpoint was taken at the end of the loop"
    _write_manifest(newest, {**_read(newest), "ended": dict(progress)})


def reopen(checkpoint: Path) -> None:
    """Have a checkpoint be again what it was at the end of its program's last loop."""
    _write_manifest(checkpoint, {n: v for n, v in _read(checkpoint).items() if n != "ended"})


def remove(checkpoint: Path) -> None:
    """Take a checkpoint away. It gets a hidden name first, by which what a kill has left of it is known later."""
    with writing(checkpoint):
        gone = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.gone"))
    take_away(gone)


def put_aside(checkpoint: Path) -> None:
    """Give a damaged checkpoint a name by which it is none; it goes when the next one has been taken."""
    with writing(checkpoint):
        checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.damaged"))


def _read(checkpoint: Path) -> dict[str, Any]:
    """Its manifest. Raises OSError, and ValueError that says what is wrong with it."""
    return without_checksum((checkpoint / MANIFEST).read_bytes())


def _write_manifest(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest, in the place of another one at once."""
    replace_file(checkpoint / MANIFEST, json.dumps(with_checksum(manifest), indent=1))


def load_manifest(checkpoint: Path, *, reopened: bool = False) -> dict[str, Any]:
    """Its manifest; ``program`` is None where that has ended, unless it is to be ``reopened``.

    Raises ResumeError for a format that is unknown.
    """
    manifest = _read(checkpoint)
    if manifest.get("format") != FORMAT:
        raise ResumeError(
            f"checkpoint {checkpoint} has format {manifest.get('format')}; this flowrl reads {FORMAT}.",
            fix="Resume with the flowrl that wrote it.",
        )
    if "ended" in manifest and not reopened:
        return {**manifest, **manifest["ended"], "program": None}
    return manifest


def record_within(checkpoint: Path) -> dict[str, Any] | None:
    """The copy of run.json in a checkpoint; None where it has none that can be trusted."""
    try:
        return _read(checkpoint).get("record")
    except (OSError, ValueError):
        return None


def load_worker(checkpoint: Path, name: str, worker: Any) -> None:
    """Give a worker its state back, on whichever ranks it is now."""
    if isinstance(worker, WorkerGroup):
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
        from ...graph.metrics import Metrics

        return Metrics(said["metrics"])
    return said["plain"]


def numbered(folder: Path) -> list[Path]:
    """Whatever has the name of a checkpoint, the newest last. Raises OSError for a folder that cannot be read."""
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: int(p.name))


def _all(folder: Path) -> list[Path]:
    return [p for p in numbered(folder) if os.path.exists(p / MANIFEST)] if folder.exists() else []


def _linked(there: Path, here: Path, name: str, known: Mapping[str, Any]) -> dict[str, Checksum]:
    """Link the files of a worker, or copy them where the file system has no links; their checksums."""
    found: dict[str, Checksum] = {}
    for file in files_of(there, name):
        copy = here / file.name
        try:
            os.link(file, copy)
        except OSError:
            with writing(copy):
                shutil.copyfile(file, copy)
                sync(copy)
        found[file.name] = Checksum(*known[file.name]) if file.name in known else checksum(copy)
    return found
