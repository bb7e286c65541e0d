"""Digests of what calls made, by field and by row: the same wherever the rows lie, and in whatever pieces they came."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from ...batch import Batch, Column, Key
from ...column import raw_bytes

_ALL = (1 << 64) - 1
_OF_ROW = 0xFFFF  # of a row 16 bits are kept: they say where a difference is, not whether there is one


@dataclass(frozen=True)
class RowDigests:
    """Digests of rows with these keys: ``RowDigests(((0, 0), (0, 1)), {"rewards": 0x9f2c...}, b"...")``.

    That of a field is the sum, modulo 2**64, of one digest for each row's key and contents. ``rows`` has two bytes for
    each row, of all its fields together.
    """

    keys: Sequence[Key]
    fields: Mapping[str, int] = field(default_factory=dict[str, int])
    rows: bytes = b""

    @staticmethod
    def of(batch: Batch, names: Collection[str]) -> RowDigests:
        """Those of some fields of a batch."""
        heads = [repr(key).encode() for key in batch.keys]
        fields: dict[str, int] = {}
        rows = array("H", bytes(2 * len(heads)))
        for name in names:
            total = 0
            title = f"{name}:{batch[name].type}:".encode()
            for i, (head, contents) in enumerate(zip(heads, contents_by_row(batch[name]), strict=True)):
                whole = blake2b(title, digest_size=8)
                whole.update(head)
                whole.update(contents)
                found = int.from_bytes(whole.digest(), "little")
                total += found
                rows[i] ^= found & _OF_ROW
            fields[name] = total & _ALL
        return RowDigests(batch.keys, fields, rows.tobytes() if fields else b"")

    @staticmethod
    def merged(parts: Iterable[RowDigests]) -> RowDigests:
        """Those of the rows of all parts together, in the order of their keys."""
        parts = list(parts)
        fields: dict[str, int] = {}
        found: dict[Key, bytes] = {}
        for part in parts:
            for name, value in part.fields.items():
                fields[name] = (fields.get(name, 0) + value) & _ALL
            for i, key in enumerate(part.keys):
                found[key] = part.rows[2 * i : 2 * i + 2]
        keys = sorted(found)
        return RowDigests(keys, fields, b"".join(found[key] for key in keys))


def contents_by_row(column: Column) -> list[Any]:
    """Return the bytes of each row of a column."""
    if isinstance(column.values, list):
        return [json.dumps(value, sort_keys=True, default=_kind).encode() for value in column.values]
    whole = memoryview(raw_bytes(column.values))
    if column.lengths is None:
        size = len(whole) // len(column) if len(column) else 0
        return [whole[i * size : (i + 1) * size] for i in range(len(column))]
    size = len(whole) // len(column.values) if len(column.values) else 0
    return [whole[a * size : b * size] for a, b in pairwise(column.offsets.tolist())]


def _kind(value: object) -> str:
    """What stands for a value that JSON does not know: an address would differ from run to run."""
    return f"<{type(value).__name__}>"


def keys_to_text(keys: Sequence[Key]) -> str:
    """Return keys in order as a short text, in which the last numbers that follow each other are one entry.

    >>> keys_to_text([(3, 0), (3, 1), (3, 2), (4, 0)])
    '3.0-2 4.0'
    """
    runs: list[tuple[Key, int, int]] = []
    for key in keys:
        if runs and runs[-1][0] == key[:-1] and runs[-1][2] == key[-1] - 1:
            runs[-1] = (key[:-1], runs[-1][1], key[-1])
        else:
            runs.append((key[:-1], key[-1], key[-1]))
    return " ".join(
        "".join(f"{part}." for part in before) + (f"{first}-{last}" if last > first else str(first))
        for before, first, last in runs
    )


def keys_of_text(text: str) -> list[Key]:
    """Return the keys that :func:`keys_to_text` wrote.

    >>> keys_of_text("3.0-2 4.0")
    [(3, 0), (3, 1), (3, 2), (4, 0)]
    """
    keys: list[Key] = []
    for entry in text.split():
        *before, run = entry.split(".")
        first, _, last = run.partition("-")
        keys += [(*map(int, before), i) for i in range(int(first), int(last or first) + 1)]
    return keys
