"""``run.json``, what a run is; and the lines of its other records, as far as they are whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import ResumeError, shown
from .disk import hexadecimal, replace_file
from .jsonl import unreadable

NAME = "run.json"
_CONFIGURATION = ("script", "programs", "parameters", "seed", "runtime", "commit", "dirty", "versions")


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write run.json, at once and with its checksum. Raises DiskError, with the file as it was."""
    replace_file(folder / NAME, json.dumps(with_checksum(record), indent=1, ensure_ascii=False))


def read_record(folder: Path) -> tuple[dict[str, Any], str]:
    """What run.json holds, and what is to be said of it: empty where it is as it was written.

    Where it is damaged or missing, the copy in the newest checkpoint that has one is taken. Raises ResumeError where
    there is none.
    """
    try:
        return without_checksum((folder / NAME).read_bytes()), ""
    except FileNotFoundError:
        why = "is missing"
    except OSError as error:
        raise unreadable(folder / NAME, error) from None
    except ValueError as error:
        why = str(error)
    from .checkpoints.checkpoint_folder import record_within

    for checkpoint in sorted((folder / "checkpoints").glob("[0-9]*"), reverse=True):
        found = record_within(checkpoint)
        if found is not None:
            return found, f"{NAME} {why}; the copy in checkpoint {checkpoint.name} is taken in its place"
    raise ResumeError(
        f"{shown(str(folder / NAME))} {why}, and no checkpoint has a copy of it. Nothing was changed.",
        fix="Bring the file back, or start anew with --overwrite.",
    )


def configuration_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's record says how it was asked for: programs, parameters, arguments of workers, data, versions."""
    inputs: Mapping[str, Any] = record.get("inputs") or {}
    found = {name: record[name] for name in _CONFIGURATION if name in record}
    return found | {name: inputs[name] for name in ("workers", "data") if name in inputs}


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the checksum of its contents, as its last entry: a copy, which no thread changes meanwhile."""
    plain = json.loads(json.dumps({name: value for name, value in record.items() if name != "checksum"}))
    return {**plain, "checksum": _checksum(plain)}


def without_checksum(raw: bytes) -> dict[str, Any]:
    """A record as it was given to :func:`with_checksum`. Raises ValueError that says what is wrong with it."""
    try:
        record = json.loads(raw.decode())
    except ValueError:
        raise ValueError("is no JSON" if raw.strip(b"\0") else "is empty" if not raw else "is full of zeros") from None
    if not isinstance(record, dict):
        raise ValueError("holds no record")
    said = record.pop("checksum", None)
    if said is not None and said != _checksum(record):
        raise ValueError("has other contents than were written")
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    """The checksum of contents, however they are laid out."""
    return hexadecimal(zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()))


def last_records(path: Path, size: int, count: int) -> list[dict[str, Any]]:
    """Return the last records of the first ``size`` bytes of a file of lines, ``count`` of them or fewer.

    What comes before them is not read.
    """
    if not path.exists():
        return []
    read = 1 << 16
    with path.open("rb") as file:
        while True:
            start = max(0, size - read)
            file.seek(start)
            raws = file.read(size - start).splitlines(keepends=True)
            found = [record for raw in raws[1 if start else 0 :] if (record := _record(raw)) is not None]
            if len(found) >= count or not start:
                return found[-count:]
            read *= 4


def records_within(path: Path, size: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a file of lines, of its first ``size`` bytes where that is said; none where there is no file.

    A last line that was cut off by a crash is left out, and so is one that is damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            size = None if size is None else size - len(raw)
            if not raw.endswith(b"\n") or (size is not None and size < 0):
                return
            if (record := _record(raw)) is not None:
                yield record


def _record(raw: bytes) -> dict[str, Any] | None:
    """The record in a whole line; None where it is cut off or damaged."""
    try:
        record = json.loads(raw.decode()) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
