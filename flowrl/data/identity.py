"""Whether a source is the same as before: its options, names, and a digest of its rows or files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from .hub_store import Hf
from .mix import Mixture
from .source import Source
from .stores import Generated, Listed
from .strata import Stratum
from .streamed import Stream

WHOLE = 1 << 26  # bytes: of a larger file blocks are read, evenly spaced
BLOCKS, BLOCK = 64, 1 << 20


def identity(source: Any) -> dict[str, Any]:
    """What a source is, flat: ``{"batch": 16, "shuffle": True, ..., "rows": "9f2c41d07a3e"}``.

    Of a function that makes rows only its name is told; of a source of the user's own, what it holds.
    """
    if isinstance(source, Mixture):
        own = {"batch": source.batch, "seed": source.seed, "column": source.column}
        own |= {"exact": True} if source.exact else {}
        weights = {f"weights.{name}": share for name, share in source.weights.items()}
        parts = {f"{name}.{key}": v for name, part in source.parts.items() for key, v in identity(part).items()}
        return {**own, **weights, **parts}
    if isinstance(source, Source):
        options = {f.name: getattr(source.reading, f.name) for f in fields(source.reading)}
        if given := sorted((options.pop("chat_template_kwargs") or {}).items()):  # records of before have no such entry
            options["chat_template_kwargs"] = ", ".join(f"{name}={value!r}" for name, value in given)
        return {**options, "rows": _rows(source.store)}
    held = cast("Mapping[str, Any]", getattr(source, "__dict__", {}))
    return {n: v for n, v in held.items() if v is None or isinstance(v, (bool, int, float, str))}


def roots(source: Any) -> Iterator[Any]:
    """The functions and classes of the user's behind a source."""
    if isinstance(source, Mixture):
        for part in source.parts.values():
            yield from roots(part)
    elif isinstance(source, Source):
        yield source.store
        yield getattr(source.store, "made_by", None)
        yield source.tokenizer
    else:
        yield type(source)


def folder_digest(folder: Path) -> str:
    """A digest of the names and contents of a folder's files."""
    return files_digest(sorted(str(p) for p in folder.rglob("*") if p.is_file()), folder)


def files_digest(paths: Iterable[str], beside: Path | None = None) -> str:
    """A digest of files: of all of it, or of the size and 64 blocks of a large one."""
    total = hashlib.blake2b(digest_size=6)
    for path in paths:
        size = os.path.getsize(path)
        total.update(f"{os.path.relpath(path, beside) if beside else ''}:{size}:".encode())
        with open(path, "rb") as file:
            if size <= WHOLE:
                while block := file.read(BLOCK):
                    total.update(block)
                continue
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                total.update(file.read(BLOCK))
    return total.hexdigest()


def _rows(store: Any) -> Any:
    """A digest of the rows of a store; the name of what makes them where they are made as they are drawn."""
    if isinstance(store, Stratum):
        return f"{_rows(store.whole)} where {store.column.name} is {store.value}"
    if isinstance(store, Generated):
        return store.title if store.size is None else f"{store.size} of {store.title}"
    if isinstance(store, Listed):
        return store.title if store.rows is None else _listed(store.rows)
    if isinstance(store, Stream):
        return f"{_hub(store)}, streamed by {store.buffer_size}"
    if isinstance(store, Hf):
        return _hub(store)
    return files_digest(store.paths())


def _hub(store: Hf) -> str:
    """A digest of the files of a data set, the fingerprint of one that is loaded; else its name."""
    if store.folder is not None:
        return folder_digest(store.folder)
    return str(getattr(store.given, "_fingerprint", store.title))


def _listed(rows: Iterable[Any]) -> str:
    total = hashlib.blake2b(digest_size=6)
    written = json.JSONEncoder(sort_keys=True, default=lambda value: type(value).__name__).encode
    for row in rows:
        total.update(written(row).encode() + b"\n")
    return total.hexdigest()
