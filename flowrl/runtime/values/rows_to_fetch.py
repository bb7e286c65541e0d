"""Rows that lie on ranks, as one of them is told to get them: which rows of which objects, and what they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...batch import Batch, Column, Key
from ...column import concat
from .remote_batch import Kind, RemoteColumn, RemoteValue, Source, Stored


@dataclass(frozen=True)
class Take:
    """Rows of one object: ``Take(rank=1, id=7, names=("tokens",), rows=(0, 2))``; with ``batch`` they are here."""

    rank: int
    id: int
    names: tuple[str, ...]
    rows: tuple[int, ...]
    batch: Batch | None = None


@dataclass(frozen=True)
class Together:
    """Columns that lie in the same objects: each as its names there, one for each of ``takes``, and its name here.

    ``order``: the place of each key among the rows taken.
    """

    takes: tuple[Take, ...]
    order: tuple[int, ...]
    fields: tuple[tuple[tuple[str, ...], str], ...]


@dataclass(frozen=True)
class Fetch:
    """A batch, or with ``column`` one field of it, that a rank puts together from what ranks hold."""

    keys: tuple[Key, ...]
    parts: tuple[Together, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    column: bool = False


def fetch(value: RemoteValue, keys: tuple[Key, ...] | None = None, names: Iterable[str] | None = None) -> Fetch:
    """Return what a rank has to get for these rows (all of them) and fields (all of them) of a value."""
    whole = {"value": value.source} if isinstance(value, RemoteColumn) else value.columns
    columns = whole if names is None else {n: whole[n] for n in names if n in whole}
    keys = value.keys if keys is None else keys
    alike: dict[tuple[Stored, ...], list[tuple[Source, str]]] = {}
    for name, source in columns.items():
        alike.setdefault(source.stored, []).append((source, name))
    parts = tuple(_together(some, keys) for some in alike.values()) if keys else ()
    kinds = {n: s.kind for n, s in columns.items()}
    return Fetch(keys, parts, kinds, column=isinstance(value, RemoteColumn))


def _together(alike: Sequence[tuple[Source, str]], keys: tuple[Key, ...]) -> Together:
    """What to take for columns that lie in the same objects."""
    stored = alike[0][0].stored
    rows, order = alike[0][0].rows(keys)
    takes: list[Take] = []
    for number, some in rows:
        s, names = stored[number], tuple(dict.fromkeys(source.names[number] for source, _ in alike))
        here = None if s.batch is None else s.batch.select(*names)
        if here is not None and some != list(range(len(here))):
            here = here.take(some)
        takes.append(Take(s.rank, s.id, names, tuple(some), here))
    fields = tuple((tuple(source.names[number] for number, _ in rows), name) for source, name in alike)
    return Together(tuple(takes), tuple(order), fields)


def assemble(wanted: Fetch, get: Callable[[Take], Mapping[str, Column]]) -> Batch | Column:
    """Return the batch or column that was asked for, in the order of its keys; ``get`` brings rows of one object."""
    columns: dict[str, Column] = {}
    for part in wanted.parts:
        brought = [get(take) for take in part.takes]
        for there, here in part.fields:
            columns_there = [b[name] for b, name in zip(brought, there, strict=True)]
            whole = columns_there[0] if len(columns_there) == 1 else concat(here, columns_there, {})
            columns[here] = whole if part.order == tuple(range(len(whole))) else whole.take(list(part.order))
    for name, kind in wanted.kinds.items():
        if name not in columns:
            columns[name] = kind.empty()
    if wanted.column:
        return columns["value"]
    return Batch(wanted.keys, {n: columns[n] for n in wanted.kinds})
