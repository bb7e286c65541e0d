"""Batches whose columns lie on ranks: the driver knows their keys and where each column is, and holds none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from ...batch import Batch, Column, Key
from ...errors import FieldError, RowsError, near
from ...graph.stand_ins.argument_trees import find_in
from ...marks import UNMARKED, Marks
from ...workers.episodes import OUTCOMES
from .row_digests import RowDigests

T = TypeVar("T")

DRIVER = -1  # the rank of what the driver made itself: rows that it drew from a data source

#: Fields whose lengths a rank reports with what it made: rows are balanced by them, and counted.
SIZED = ("tokens", "prompt_ids", "response_ids")
#: A field bool[] of rows that were sampled, which a rank reports too, as 1 and 0: those that are not were cut off.
FINISHED = "finished"
#: Fields i32[] of episodes, which a rank reports too; and ``outcome``, as its place in OUTCOMES.
COUNTED = ("turns", "sampled_tokens", "delivered_tokens", "retries", "replaced", "forks", "repairs")
OUTCOME = "outcome"


@dataclass(frozen=True)
class Kind:
    """What a column is, without its rows: ``Kind("i32", "token")``; ``inner`` are the dims behind the rows.

    ``marks`` are where it comes from.
    """

    dtype: str
    dim: str | None = None
    inner: tuple[int, ...] = ()
    marks: Marks = UNMARKED

    @staticmethod
    def of(column: Column) -> Kind:
        """The kind of a column."""
        inner = () if isinstance(column.values, list) else tuple(column.values.shape[1:])
        return Kind(column.dtype, column.dim if column.lengths is not None else None, inner, column.marks)

    def empty(self) -> Column:
        """A column of it without rows."""
        if self.dtype == "any":
            return Column([], marks=self.marks)
        import torch

        values = Column.of([], dtype=self.dtype).values.reshape(0, *self.inner)
        lengths = None if self.dim is None else torch.zeros(0, dtype=torch.int64)
        return Column(values, lengths, self.dim, self.marks)


class Stored:
    """An object that a rank holds: rows with some columns. It is freed there once the driver forgets it.

    ``sizes``: tokens of each row, by field; ``bytes`` of each column; ``oldest``: the version of each row's oldest
    token, where it was sampled; ``digests`` of its rows. What the driver drew itself is in ``batch``.
    """

    __slots__ = ("_index", "batch", "bytes", "digests", "drop", "id", "keys", "kinds", "oldest", "rank", "sizes")

    def __init__(
        self,
        rank: int,
        id: int,
        keys: tuple[Key, ...],
        kinds: Mapping[str, Kind],
        sizes: Mapping[str, Sequence[int]],
        drop: Callable[[int, int], None] | None = None,
        batch: Batch | None = None,
        bytes: Mapping[str, int] | None = None,
        oldest: Sequence[int | None] = (),
        digests: RowDigests | None = None,
    ) -> None:
        self.rank, self.id, self.keys, self.kinds, self.sizes = rank, id, keys, kinds, sizes
        self.drop, self.batch, self.bytes, self.oldest = drop, batch, bytes or {}, oldest
        self.digests = digests
        self._index: dict[Key, int] | None = None

    @property
    def index(self) -> dict[Key, int]:
        """The row of each key."""
        if self._index is None:
            self._index = {key: i for i, key in enumerate(self.keys)}
        return self._index

    def __del__(self) -> None:
        if self.drop is not None:
            self.drop(self.rank, self.id)


@dataclass(frozen=True)
class Source:
    """Where a column is: in these objects, each of which has some of its rows, under the name that goes with it."""

    stored: tuple[Stored, ...]
    names: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        return self.stored[0].kinds[self.names[0]]

    @property
    def marks(self) -> Marks:
        """Where its rows come from."""
        return UNMARKED.union(*(s.kinds[name].marks for s, name in zip(self.stored, self.names, strict=True)))

    def rows(self, keys: Iterable[Key]) -> tuple[list[tuple[int, list[int]]], list[int]]:
        """Which rows of which objects these keys need, each once, and for each key its place among them.

        A key that is in none of them stands for its longest prefix that is: the row that it was made from.
        """
        taken: list[dict[int, int]] = [{} for _ in self.stored]
        places: list[tuple[int, int]] = []
        for key in keys:
            at, prefix = self._find(key), key
            while at is None:
                if not prefix:
                    raise RowsError(f"No row of '{self.names[0]}' is, or is the parent of, the row {key}.")
                prefix = prefix[:-1]
                at = self._find(prefix)
            number, row = at
            places.append((number, taken[number].setdefault(row, len(taken[number]))))
        starts = [0, *accumulate(len(rows) for rows in taken)]
        parts = [(number, list(rows)) for number, rows in enumerate(taken) if rows]
        return parts, [starts[number] + place for number, place in places]

    def at(self, key: Key) -> tuple[Stored, int]:
        """The object and the row that a key stands for."""
        parts, _ = self.rows((key,))
        return self.stored[parts[0][0]], parts[0][1][0]

    def kept(self, keys: Sequence[Key]) -> Source:
        """The same for these keys alone: without objects that have none of their rows."""
        if len(self.stored) == 1:
            return self
        used = [number for number, _ in self.rows(keys)[0]] or [0]
        if len(used) == len(self.stored):
            return self
        return Source(tuple(self.stored[n] for n in used), tuple(self.names[n] for n in used))

    def bytes(self, rows: int) -> int:
        """Bytes of so many rows, as large as those of its objects are on average: exact for all of them."""
        there = sum(len(s.keys) for s in self.stored)
        whole = sum(s.bytes.get(name, 0) for s, name in zip(self.stored, self.names, strict=True))
        return round(whole * rows / there) if there else 0

    def oldest(self, keys: Iterable[Key]) -> list[int | None] | None:
        """The version of each row's oldest token; None where the objects do not say it."""
        if not all(s.oldest or not s.keys for s in self.stored):
            return None
        return self._of_rows(keys, lambda number: self.stored[number].oldest)

    def _find(self, key: Key) -> tuple[int, int] | None:
        for number, stored in enumerate(self.stored):
            row = stored.index.get(key)
            if row is not None:
                return number, row
        return None

    def sizes(self, keys: Iterable[Key]) -> list[int] | None:
        """Tokens of each row, where they are known."""
        if any(name not in s.sizes for s, name in zip(self.stored, self.names, strict=True)):
            return None
        return self._of_rows(keys, lambda number: self.stored[number].sizes[self.names[number]])

    def _of_rows(self, keys: Iterable[Key], of_object: Callable[[int], Sequence[T]]) -> list[T]:
        """Return for each row what its object says of it."""
        parts, places = self.rows(keys)
        listed = [of_object(number)[row] for number, rows in parts for row in rows]
        return [listed[place] for place in places]


@dataclass(frozen=True)
class RemoteColumn:
    """One field of a remote batch, or what was computed from some."""

    keys: tuple[Key, ...]
    source: Source

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where its rows are, as of a batch with this one field."""
        return (self.source,)

    def __len__(self) -> int:
        return len(self.keys)


class RemoteBatch:
    """A batch whose columns lie on ranks. It has what the driver needs of a :class:`Batch`: keys, fields, rows."""

    __slots__ = ("__weakref__", "_columns", "keys")

    def __init__(self, keys: tuple[Key, ...], columns: Mapping[str, Source]) -> None:
        self.keys, self._columns = keys, dict(columns)

    @staticmethod
    def drawn(batch: Batch) -> RemoteBatch:
        """A batch that the driver made itself, such as rows of a data source."""
        kinds = {n: Kind.of(batch[n]) for n in batch.fields}
        sizes, oldest = sizes_of(batch), oldest_of(batch) or ()
        stored = Stored(DRIVER, 0, batch.keys, kinds, sizes, batch=batch, bytes=column_bytes(batch), oldest=oldest)
        return RemoteBatch(batch.keys, {n: Source((stored,), (n,)) for n in batch.fields})

    @property
    def columns(self) -> Mapping[str, Source]:
        return self._columns

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where its columns are."""
        return tuple(self._columns.values())

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> RemoteColumn:
        return RemoteColumn(self.keys, self._source(name))

    def _source(self, name: str) -> Source:
        if name not in self._columns:
            meant = near(name, self._columns)
            fix = f"Did you mean '{meant}'?" if meant else None
            raise FieldError(f"The batch has no field '{name}'.", have=self._columns, fix=fix)
        return self._columns[name]

    def groups(self) -> list[list[int]]:
        """Row numbers by prompt, as :meth:`Batch.groups` gives them."""
        rows: dict[int, list[int]] = {}
        for i, key in enumerate(self.keys):
            rows.setdefault(key[0], []).append(i)
        return list(rows.values())

    def take(self, index: Sequence[int]) -> RemoteBatch:
        """Some of the rows, in this order."""
        keys = tuple(self.keys[i] for i in index)
        return RemoteBatch(keys, {n: s.kept(keys) for n, s in self._columns.items()})

    def select(self, *names: str) -> RemoteBatch:
        """Only these fields."""
        return RemoteBatch(self.keys, {n: self._source(n) for n in names})

    def with_sources(self, columns: Mapping[str, Source], keys: tuple[Key, ...] | None = None) -> RemoteBatch:
        """Further columns, and rows that are these, some of them, or made from them."""
        for name in columns:
            if name in self._columns:
                raise FieldError(f"'{name}' is written twice.", have=self._columns, fix="Rename one of the two.")
        if keys is None or keys == self.keys:
            return RemoteBatch(self.keys, {**self._columns, **columns})
        return RemoteBatch(keys, {**{n: s.kept(keys) for n, s in self._columns.items()}, **columns})

    @staticmethod
    def concat(batches: Sequence[RemoteBatch]) -> RemoteBatch:
        """The rows of all, one after the other. They have the same fields and different keys."""
        first = batches[0]
        for other in batches[1:]:
            different = sorted(set(first.fields) ^ set(other.fields))
            if different:
                raise FieldError(f"'{different[0]}' is a field of some of the batches only.", have=first.fields)
        keys = tuple(key for b in batches for key in b.keys)
        if len(set(keys)) != len(keys):
            raise RowsError("Batches that have rows in common cannot be put together.")
        some = [b for b in batches if len(b)] or [first]
        return RemoteBatch(keys, {n: join_sources([b.columns[n] for b in some]) for n in first.fields})

    @staticmethod
    def can_concat(batches: Sequence[RemoteBatch]) -> bool:
        """Whether each key finds its own row among the objects of all: versions of a row may lie in two of them."""
        for name in batches[0].fields:
            sources = [b.columns[name] for b in batches if name in b]
            if len({s for source in sources for s in source.stored}) > 1:
                whole = join_sources(sources)
                if any(s.at(k) != whole.at(k) for b, s in zip(batches, sources, strict=True) for k in b.keys):
                    return False
        return True

    def sizes(self) -> list[int]:
        """Tokens of each row as far as they are known, for balancing: 1 where nothing is."""
        for name in SIZED:
            if name in self._columns and (sizes := self._columns[name].sizes(self.keys)) is not None:
                return [max(1, n) for n in sizes]
        return [1] * len(self.keys)

    def count(self, name: str) -> int:
        """Tokens of a field in all rows together; 0 where they are not known."""
        sizes = self._columns[name].sizes(self.keys) if name in self._columns else None
        return sum(sizes or ())


#: A value whose rows lie on ranks.
RemoteValue = RemoteBatch | RemoteColumn


def remote_values(arguments: Any) -> Iterator[RemoteValue]:
    """Yield the values among arguments whose rows lie on ranks."""
    return find_in(arguments, (RemoteBatch, RemoteColumn))


def bytes_of(column: Column) -> int:
    """Bytes of a column's rows: of its numbers, or of what its values are written as."""
    if isinstance(column.values, list):
        return sum(map(len, map(str, column.values)))
    return column.values.nbytes


def column_bytes(batch: Batch) -> dict[str, int]:
    """Bytes of each column."""
    return {name: bytes_of(batch[name]) for name in batch.fields}


def oldest_of(batch: Batch) -> list[int | None] | None:
    """The version that the oldest token of each row was sampled with, None for a row without sampled tokens; None where
    rows were not sampled.

    Tokens that an environment has put in between have none."""
    if "versions" not in batch.fields or batch["versions"].lengths is None:
        return None
    import torch

    column = batch["versions"]
    values, lengths = column.values.cpu().double(), column.lengths
    if not len(values):
        return list[int | None]([None] * len(lengths))
    if "response_mask" in batch.fields and len(mask := batch["response_mask"].values) == len(values):
        values = values.masked_fill(~mask.cpu().bool(), float("inf"))
    least = torch.segment_reduce(values, "min", lengths=lengths, unsafe=True, initial=float("inf"))
    return [None if version == float("inf") else int(version) for version in least.tolist()]


def join_sources(sources: Sequence[Source]) -> Source:
    """Return one source for the rows of several."""
    pairs = dict.fromkeys(p for source in sources for p in zip(source.stored, source.names, strict=True))
    return Source(tuple(s for s, _ in pairs), tuple(n for _, n in pairs))


def sizes_of(batch: Batch) -> dict[str, list[int]]:
    """Tokens of each row of the fields that are balanced by, which rows are finished, and counts of episodes."""
    ragged = [name for name in SIZED if name in batch.fields and batch[name].lengths is not None]
    return {name: batch[name].lengths.tolist() for name in ragged} | finished_of(batch) | counted_of(batch)


def finished_of(batch: Batch) -> dict[str, list[int]]:
    """Return 1 for each row that is finished and 0 for the others; nothing where the rows do not say."""
    if FINISHED not in batch.fields or batch[FINISHED].dtype != "bool" or batch[FINISHED].lengths is not None:
        return {}
    return {FINISHED: batch[FINISHED].values.int().tolist()}


def counted_of(batch: Batch) -> dict[str, list[int]]:
    """Return what is counted of each episode, and the place of its outcome in OUTCOMES; nothing of other rows."""
    if OUTCOME not in batch.fields or any(name not in batch.fields for name in COUNTED):
        return {}
    outcomes = batch[OUTCOME].to_list()
    if not all(outcome in OUTCOMES for outcome in outcomes):
        return {}  # fields of a user's own, under these names
    found = {name: [int(count) for count in batch[name].to_list()] for name in COUNTED}
    return found | {OUTCOME: [OUTCOMES.index(outcome) for outcome in outcomes]}
