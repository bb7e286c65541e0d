"""The rows of a call that met numbers which are not finite, written down for a person to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...batch import Batch
from .disk import replace_file

FOLDER = "not_finite"
MOST = 256  # rows that are written down


def save_rows(out: Path, *, step: int, op: str, rows: Batch) -> Path:
    """Write rows into the folder of a run, a line of JSON each, and return the file.

    Where some have fields that are not finite it is those, else all of them, as the loss of any may be at fault; at
    most 256. ``not_finite`` has the places of such numbers by field, which are null themselves.
    """
    columns = {name: rows[name].to_list() for name in rows.fields}
    lines = [_line(key, {name: column[i] for name, column in columns.items()}) for i, key in enumerate(rows.keys)]
    bad = [line for line in lines if line["not_finite"]] or lines
    path = out / FOLDER / f"{step}-{op}.jsonl"
    path.parent.mkdir(exist_ok=True)
    replace_file(path, "".join(json.dumps(line, default=str) + "\n" for line in bad[:MOST]))
    return path


def _line(key: tuple[int, ...], entries: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[int]] = {}
    for name, entry in entries.items():
        values = entry if isinstance(entry, list) else [entry]
        places = [i for i, value in enumerate(values) if isinstance(value, float) and not _finite(value)]
        if places:
            found[name] = places
            plain = [None if i in places else value for i, value in enumerate(values)]
            entries = {**entries, name: plain if isinstance(entry, list) else plain[0]}
    return {"key": list(key), "not_finite": found, **{f"batch.{n}" if n == "key" else n: e for n, e in entries.items()}}


def _finite(value: float) -> bool:
    return value - value == 0
