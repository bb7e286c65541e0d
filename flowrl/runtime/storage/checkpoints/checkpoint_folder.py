"""A checkpoint: one folder that appears whole or not at all, of safetensors and JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ....batch import Batch, Column
from ....errors import ResumeError
from ...distributed.worker_group import WorkerGroup
from ...values.remote_batch import RemoteBatch, RemoteColumn, RemoteValue
from ..disk import Checksum, checksum, replace_file, sync, write_tensors, writing
from ..disk import remove as take_away
from ..run_record import with_checksum, without_checksum
from .snapshot import Captured
from .state_files import StateFiles, files_of, read_record

FORMAT = 2
KEEP = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"\d{6,}")
_OURS = re.compile(r"\.?(\d{6,})(\.(part|gone|damaged))?")

CaptureState = Callable[[Path, str, Any], Captured]
CaptureRows = Callable[[Any, Path], tuple[Mapping[str, Any], Captured]]


@dataclass(frozen=True)
class Begun:
    """A checkpoint that is not there yet: ``number``, the ``part`` folder that becomes it, and what goes into it.

    When it is there, the newest ``keep`` stay, and with ``keep_best`` the one with the largest score.
    """

    folder: Path
    number: int
    manifest: Mapping[str, Any]
    captured: tuple[Captured, ...]
    keep: int = KEEP
    keep_best: bool = False

    @property
    def part(self) -> Path:
        return self.folder / f".{self.number:06d}.part"

    @property
    def target(self) -> Path:
        return self.folder / f"{self.number:06d}"


def begin(
    folder: Path,
    manifest: Mapping[str, Any],
    workers: Mapping[str, Any],
    live: Mapping[int, Any],
    *,
    capture_state: CaptureState,
    capture_rows: CaptureRows | None = None,
    after: int = -1,
) -> Begun:
    """Capture the state of workers and the live values as they are, for :func:`write`: all of them may change then.

    The files of a worker that has not changed since the last checkpoint but one are links to those of then: the two
    that are kept share none, so that damage to a file is damage to one of them. ``capture_state`` copies the state of
    another one, of whom it is given the folder for its files and the name; ``capture_rows`` rows that lie on ranks. The
    number is above that of all that are there, and above ``after``. Raises DiskError.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    before = next(iter(_all(folder)[-2:-1]), None)
    number = max([after, *_ours(folder).values()]) + 1
    part = Begun(folder, number, {}, ()).part
    try:
        with writing(part):
            part.mkdir()
        said, captured = _capture(part, before, workers, live, capture_state, capture_rows)
    except BaseException:
        take_away(part)
        raise
    now = json.loads(json.dumps({"format": FORMAT, **manifest, **said}))  # the run goes on while it is written
    return Begun(folder, number, now, captured)


def _capture(
    part: Path,
    before: Path | None,
    workers: Mapping[str, Any],
    live: Mapping[int, Any],
    capture_state: CaptureState,
    capture_rows: CaptureRows | None,
) -> tuple[dict[str, Any], tuple[Captured, ...]]:
    """What a manifest says of workers and live values, and the files that they become."""
    past: dict[str, Any] = {"stamps": {}}
    if before is not None:
        with suppress(OSError, ValueError):  # what is damaged by now is written anew
            past = _read(before)
    captured: list[Captured] = []
    for name, worker in workers.items():
        if before and past["stamps"].get(name) == worker.stamp and (before / f"{name}.json").exists():
            captured.append(Captured(partial(_link, before, part, name, past.get("files", {}))))
        else:
            captured.append(capture_state(part, name, worker))
    here = {i: v for i, v in live.items() if not isinstance(v, RemoteValue)}
    tensors, values = _packed(here)
    for index, value in live.items():
        if index not in here:
            assert capture_rows is not None, "rows that lie on ranks are written there"
            meta, rows = capture_rows(value, part / f"live.{index}.safetensors")
            captured.append(rows)
            values[str(index)] = {"rows": meta, "column": isinstance(value, RemoteColumn)}
    distinct, same = _distinct(tensors)
    if distinct:
        file = part / "live.safetensors"
        captured.append(Captured(lambda: {file.name: write_tensors(file, distinct)}))
    stamps = {name: worker.stamp for name, worker in workers.items()}
    return {"stamps": stamps, "live": values, "live_same": same}, tuple(captured)


def write(begun: Begun, commit: Callable[[Callable[[], None]], None] = lambda do: do()) -> Path:
    """Write a checkpoint that was begun, its manifest last; then keep as many of the newest as it says, and the best.

    The manifest has the checksums of all files, and of itself. ``commit`` is handed what makes the checkpoint count,
    to do it or to raise. Raises DiskError where the disk does not take it: then nothing of it stays.
    """
    part, target, folder = begun.part, begun.target, begun.folder
    ours = [path for path in _ours(folder) if path != part]
    try:
        for left in ours:
            if left.name.startswith("."):  # of a checkpoint that was not finished, or not taken away to its end
                take_away(left)
        files = {name: said for captured in begun.captured for name, said in captured.write().items()}
        _write_manifest(part, {**begun.manifest, "files": files})
        with writing(target):
            sync(part)
            commit(lambda: _appear(part, target))
    except BaseException:
        take_away(part)
        raise
    _remove_stale(folder, [path for path in ours if not path.name.startswith(".")], begun.keep, begun.keep_best)
    return target


def write_again(
    folder: Path,
    manifest: Mapping[str, Any],
    workers: Mapping[str, Any],
    live: Mapping[int, Any],
    *,
    keep: int = KEEP,
    keep_best: bool = False,
) -> bool:
    """Write only the manifest anew, where the newest checkpoint of a folder has the same state already.

    It has it where the program has issued no call and read no value since, and no worker has changed; the program may
    hold fewer values. Returns whether that was so; else nothing is done, and the checkpoint is to be taken. Raises
    DiskError.
    """
    newest = latest(folder)
    if newest is None:
        return False
    try:
        past = _read(newest)
    except (OSError, ValueError):  # a damaged one is written anew
        return False
    now = json.loads(json.dumps(manifest))
    stamps = {name: worker.stamp for name, worker in workers.items()}
    if "ended" in past or past.get("format") != FORMAT or _place(past) != _place(now):
        return False
    held = {str(index) for index in live}
    if past.get("stamps") != stamps or not held <= past["live"].keys():
        return False
    values = {index: said for index, said in past["live"].items() if index in held}
    _write_manifest(newest, {**past, **now, "live": values})
    _remove_stale(folder, _all(folder), keep, keep_best)
    return True


def _place(manifest: Mapping[str, Any]) -> Any:
    """Where the programs of a run are, by its manifest; no two places are equal where a program has ended."""
    program = manifest["program"]
    if program is None:
        return object()
    names = ("calls", "reads", "steps", "draws", "course", "cursors", "held")
    return manifest.get("run"), manifest["stage"], [program.get(name) for name in names]


def _remove_stale(folder: Path, among: Iterable[Path], keep: int, keep_best: bool) -> None:
    """Remove the checkpoints that are neither among the newest so many nor the best one."""
    kept = [*_all(folder)[-keep:], *filter(None, [best(folder) if keep_best else None])]
    for stale in among:
        if stale not in kept:
            remove(stale)


def _appear(part: Path, target: Path) -> None:
    part.rename(target)
    sync(target.parent)


def _ours(folder: Path) -> dict[Path, int]:
    """All checkpoints, whole or not, with their numbers."""
    return {p: int(found[1]) for p in folder.iterdir() if (found := _OURS.fullmatch(p.name))}


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder. Nothing is said of whether it is damaged."""
    return next(reversed(_all(folder)), None)


def best(folder: Path) -> Path | None:
    """Return the checkpoint with the largest score, the newest of equal ones; None where none was compared."""
    scores: list[tuple[float, int, Path]] = []
    for number, path in enumerate(_all(folder)):
        with suppress(OSError, ValueError):  # a damaged one is not compared
            if said := _read(path).get("best"):
                scores.append((said["score"], number, path))
    return max(scores)[2] if scores else None


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
    replace_file(checkpoint / MANIFEST, json.dumps(with_checksum(manifest)))


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
    return RemoteColumn(batch.keys, RemoteBatch.drawn(batch).columns["value"]) if said["column"] else batch


def _tensors(file: Path, same: Mapping[str, str]) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors = load_file(file) if file.exists() else {}
    return tensors | {name: tensors[first] for name, first in same.items()}


def _distinct(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Copies of tensors on the CPU, and the names of those that are another one."""
    found: dict[str, Any] = {}
    same: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            same[name] = first[place]
            continue
        first[place] = name
        found[name] = tensor.detach().to("cpu", copy=True).contiguous()
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
        from ....graph.ops.update_metrics import Metrics

        return Metrics(said["metrics"])
    return said["plain"]


def numbered(folder: Path) -> list[Path]:
    """Whatever has the name of a checkpoint, the newest last. Raises OSError for a folder that cannot be read."""
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: int(p.name))


def _all(folder: Path) -> list[Path]:
    return [p for p in numbered(folder) if os.path.exists(p / MANIFEST)] if folder.exists() else []


def _link(there: Path, here: Path, name: str, known: Mapping[str, Any]) -> dict[str, Checksum]:
    """Link the files of a worker as another checkpoint has them, or copy them where the file system has no links.

    Returns their checksums.
    """
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
