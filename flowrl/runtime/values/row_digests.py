"""Digests of what calls made, by field and by row: the same wherever the rows lie, and in whatever pieces they came."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from ...batch import Batch, Column, Key
from ...column import of_each, raw_bytes
from ...splitmix import GOLDEN, mix

_ALL = (1 << 64) - 1


@dataclass(frozen=True)
class RowDigests:
    """Digests of rows with these keys: ``RowDigests(((0, 0), (0, 1)), {"rewards": 0x9f2c...}, b"...")``.

    That of a field is the sum, modulo 2**64, of one digest for each row's key and contents. ``rows`` has two bytes for
    each row, of all its fields together: they say where a difference is, not whether there is one.
    """

    keys: Sequence[Key]
    fields: Mapping[str, int] = field(default_factory=dict[str, int])
    rows: bytes = b""

    @staticmethod
    def of(batch: Batch, names: Collection[str]) -> RowDigests:
        """Those of some fields of a batch."""
        import numpy as np

        fields: dict[str, int] = {}
        rows = np.zeros(len(batch.keys), np.int64)
        for name in names:
            found = mix(_titled_keys(batch.keys, name, str(batch[name].type)) + _mixed_contents(batch[name]))
            fields[name] = int(found.sum()) & _ALL
            rows ^= found
        return RowDigests(batch.keys, fields, rows.astype("<u2").tobytes() if fields else b"")

    @staticmethod
    def merged(parts: Iterable[RowDigests]) -> RowDigests:
        """Those of the rows of all parts together, in the order of their keys."""
        parts = list(parts)
        if len(parts) == 1 and _in_order(keys := tuple(parts[0].keys)):
            return RowDigests(keys, parts[0].fields, parts[0].rows)
        fields: dict[str, int] = {}
        found: dict[Key, bytes] = {}
        for part in parts:
            for name, value in part.fields.items():
                fields[name] = (fields.get(name, 0) + value) & _ALL
            for i, key in enumerate(part.keys):
                found[key] = part.rows[2 * i : 2 * i + 2]
        keys = tuple(sorted(found))
        return RowDigests(keys, fields, b"".join(found[key] for key in keys))


@lru_cache(maxsize=32)  # a step's calls are of the same rows
def _in_order(keys: tuple[Key, ...]) -> bool:
    return all(one < other for one, other in pairwise(keys))


@lru_cache(maxsize=128)
def _titled_keys(keys: tuple[Key, ...], name: str, kind: str) -> Any:
    """Return a number for the field of this name in each row, of 64 bits."""
    return mix(_mixed_keys(keys) ^ _number(f"{name}:{kind}:".encode("utf-8", "surrogatepass")))


@lru_cache(maxsize=32)
def _mixed_keys(keys: tuple[Key, ...]) -> Any:
    """Return a number for each key, of 64 bits."""
    import numpy as np

    found = np.zeros(len(keys), np.int64)
    for length in set(map(len, keys)):
        same = [i for i, key in enumerate(keys) if len(key) == length]
        found[same] = _mixed_words(np.array([keys[i] for i in same], np.int64).reshape(len(same), length)) + length
    return found


def _mixed_contents(column: Column) -> Any:
    """Return a number for the contents of each row, of 64 bits."""
    import numpy as np

    if isinstance(column.values, list):
        return np.array(of_each(column.values, lambda value: _number(_as_json(value).encode())), np.int64)
    found = _mixed_words(_words(raw_bytes(column.values), len(column.values)))
    if column.lengths is None:
        return found
    offsets = column.offsets.numpy()
    place = np.arange(len(found)) - np.repeat(offsets[:-1], np.diff(offsets))
    sums = np.concatenate([[0], np.cumsum(mix(found + (place + 1) * GOLDEN))])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _words(contents: bytes, count: int) -> Any:
    """Return the contents of so many elements as i64[elements, words]."""
    import numpy as np

    size = len(contents) // count if count else 8
    if size in (1, 2, 4, 8):
        return np.frombuffer(contents, f"<i{size}").astype(np.int64)[:, None]
    padded = np.zeros((count, -(-size // 8) * 8), np.uint8)
    padded[:, :size] = np.frombuffer(contents, np.uint8).reshape(count, size)
    return padded.view("<i8")


def _mixed_words(words: Any) -> Any:
    """Return a number for each row of i64[rows, words], of their values and places; one word stands for itself."""
    import numpy as np

    if words.shape[1] == 1:
        return words[:, 0]
    return mix(words + np.arange(1, words.shape[1] + 1) * GOLDEN).sum(1)


def _number(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def _kind(value: object) -> str:
    """What stands for a value that JSON does not know: an address would differ from run to run."""
    return f"<{type(value).__name__}>"


_as_json = json.JSONEncoder(sort_keys=True, default=_kind).encode  # one for all rows: json.dumps makes one for each


def keys_to_text(keys: Iterable[Key]) -> str:
    """Return keys in order as a short text, in which the last numbers that follow each other are one entry.

    >>> keys_to_text([(3, 0), (3, 1), (3, 2), (4, 0)])
    '3.0-2 4.0'
    """
    return _text_of(tuple(keys))


@lru_cache(maxsize=32)
def _text_of(keys: tuple[Key, ...]) -> str:
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
