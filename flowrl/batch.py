"""What moves between ops: rows with keys, and typed columns under names. A batch never changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .column import Column, concat, raw_bytes, read_marks, row_index, segment_sums
from .errors import FieldError, RowsError, did_you_mean
from .html_tables import ROWS, table

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[int, ...]  # (prompt uid, sample index, ...); the children of a row append one number


@dataclass(frozen=True)
class CallInfo:
    """Which call of which op: ``CallInfo(seed=7, program="grpo", step=3, op="actor.generate")``.

    Seeds of rows come from it. ``occurrence`` counts the calls of the op in the step. ``outside``: it is made between
    steps, and ``step`` is the one to come; seeds do not depend on that. ``recorded``: the prompts, by the first numbers
    of their keys, whose rows are written down, so an update keeps what it finds of their tokens.
    """

    seed: int = 0
    program: str = ""
    step: int = 0
    op: str = ""
    occurrence: int = 0
    outside: bool = False
    recorded: tuple[int, ...] = ()


class MissingField(FieldError, AttributeError):
    """A field ``name`` that a batch has not; also an AttributeError, so that ``hasattr`` and ``getattr`` work."""


_SHOWN = 12  # fields that a notebook shows
MissingField.__name__ = "FieldError"  # as it is reported


class Batch:
    """Rows with keys and typed columns: ``Batch.of(2, prompt=["1+2=", "3+4="], rewards=[1.0, 0.0])``.

    ``keys`` are unique; ``batch.rewards`` or ``batch["rewards"]`` is a column. FieldError for a field that is
    not there, RowsError for columns or batches whose rows differ.

    >>> batch = fl.Batch.of([(0, 0), (0, 1), (1, 0)], rewards=[1.0, 0.0, 1.0])
    >>> batch.fields, len(batch), batch.rewards.mean()
    (('rewards',), 3, 0.6666666666666666)
    >>> batch.filter(batch.group_std("rewards") > 0).keys
    ((0, 0), (0, 1))
    """

    __slots__ = ("__weakref__", "_columns", "_groups", "call", "keys")

    keys: tuple[Key, ...]
    call: CallInfo | None

    def __init__(self, keys: Iterable[Key], columns: Mapping[str, Column], call: CallInfo | None = None) -> None:
        self._set(tuple(keys), dict(columns), call)
        if len(set(self.keys)) != len(self.keys):
            raise RowsError(f"The key {_twice(self.keys)} is given to two rows.")
        for name, column in self._columns.items():
            if len(column) != len(self.keys):
                raise RowsError(f"'{name}' has {len(column)} rows, the batch has {len(self.keys)}.")

    def _set(self, keys: tuple[Key, ...], columns: dict[str, Column], call: CallInfo | None) -> None:
        for name, value in (("keys", keys), ("_columns", columns), ("call", call), ("_groups", None)):
            object.__setattr__(self, name, value)

    @classmethod
    def _make(cls, keys: tuple[Key, ...], columns: dict[str, Column], call: CallInfo | None) -> Batch:
        """Return a batch of parts that are known to fit, without looking at them."""
        batch = cls.__new__(cls)
        batch._set(keys, columns, call)
        return batch

    @staticmethod
    def of(keys: int | Iterable[Key | int] | None = None, /, **data: Any) -> Batch:
        """Return a batch of columns, or of anything that :meth:`Column.of` takes.

        ``keys``: a list, or a number n for (0,), (1,), ...; None takes n from the data.
        """
        columns = {name: Column.of(value) for name, value in data.items()}
        if keys is None:
            keys = len(next(iter(columns.values()), ()))
        listed = range(keys) if isinstance(keys, int) else keys
        return Batch(((k,) if isinstance(k, int) else tuple(map(int, k)) for k in listed), columns)

    @property
    def columns(self) -> Mapping[str, Column]:
        return MappingProxyType(self._columns)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(self.keys)

    def __getattr__(self, name: str) -> Column:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            fix = did_you_mean(name, self._columns)
            error = MissingField(f"The batch has no field '{name}'.", have=self._columns, fix=fix)
            error.name = name
            raise error from None

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __setattr__(self, name: str, value: Any) -> None:
        raise FieldError(
            f"A batch does not change; '{name}' cannot be set.", fix=f"Use with_columns({{'{name}': ...}})."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self.keys, self._columns, self.call)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} rows: {', '.join(f'{n}: {c.type}' for n, c in self._columns.items())}>"

    def _repr_html_(self) -> str:
        """Its first rows, for a notebook."""
        names = list(self.fields)[:_SHOWN]
        some = self.take(range(min(len(self), ROWS)))
        left = [f"{len(self) - len(some)} more rows"] if len(self) > len(some) else []
        left += [f"more fields: {', '.join(self.fields[_SHOWN:])}"] if len(self.fields) > _SHOWN else []
        rows = zip(some.keys, *(some[name].to_list() for name in names), strict=True)
        return table(["key", *names], rows, title=repr(self)[1:-1], note="; ".join(left))

    def _with(self, columns: dict[str, Column]) -> Batch:
        return Batch._make(self.keys, columns, self.call)

    def with_call(self, call: CallInfo | None) -> Batch:
        """Return the same rows, handed to another call of an op."""
        return Batch._make(self.keys, self._columns, call)

    def select(self, *names: str) -> Batch:
        """Return the rows with these fields alone. Raises FieldError for one that is not there."""
        return self._with({name: self[name] for name in names})

    def drop(self, *names: str) -> Batch:
        """Return the rows without these fields. Raises FieldError for one that is not there."""
        for name in names:
            self[name]
        return self._with({n: c for n, c in self._columns.items() if n not in names})

    def rename(self, **names: str) -> Batch:
        """Return the rows with fields renamed: ``batch.rename(rewards="costs")`` calls the rewards costs."""
        for name in names:
            self[name]
        pairs = [(names.get(n, n), c) for n, c in self._columns.items()]
        columns = dict(pairs)
        if len(columns) < len(pairs):
            raise already_there("rename", _twice([n for n, _ in pairs]))
        return self._with(columns)

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        """Return the rows with further columns, whose rows are the same in the same order. Raises RowsError if not."""
        for name, column in columns.items():
            if name in self._columns:
                raise already_there("with_columns", name)
            if len(column) != len(self.keys):
                raise RowsError(f"'{name}' has {len(column)} rows, the batch has {len(self.keys)}.")
        return self._with({**self._columns, **columns})

    def __or__(self, other: Batch) -> Batch:
        """The fields of both, joined on keys; rows in the order of this one."""
        if self.keys != other.keys:
            place = {key: i for i, key in enumerate(other.keys)}
            if len(place) != len(self) or any(key not in place for key in self.keys):
                raise _different_rows(self.keys, other.keys)
            other = other._rows([place[key] for key in self.keys], self.keys)
        for name, column in other._columns.items():
            if name in self._columns and not self._columns[name].equal(column):
                raise FieldError(
                    f"'{name}' is written twice: the two sides of a join differ.",
                    fix="Rename one of the two.",
                )
        return self._with({**self._columns, **{n: c for n, c in other._columns.items() if n not in self._columns}})

    def _rows(self, index: Any, keys: tuple[Key, ...]) -> Batch:
        index, known = row_index(index), {}
        return Batch._make(keys, {n: c._take(index, known) for n, c in self._columns.items()}, self.call)

    def take(self, index: Any) -> Batch:
        """Return the rows of ``index`` (numbers from 0), in its order. Raises RowsError for one missing or twice."""
        listed = row_index(index).tolist()
        if listed and not 0 <= min(listed) <= max(listed) < len(self):
            raise RowsError(f"Row {max(listed) if min(listed) >= 0 else min(listed)} of a batch of {len(self)} rows.")
        if len(set(listed)) < len(listed):
            raise RowsError(
                f"Row {_twice(listed)} is taken twice.", fix="Use expand(n), which gives the copies new keys."
            )
        return self._rows(listed, tuple([self.keys[i] for i in listed]))

    def take_keys(self, keys: Iterable[Key]) -> Batch:
        """Return for every key the row that has it, or its longest prefix; the result has the given keys."""
        place = {key: i for i, key in enumerate(self.keys)}
        keys, index = tuple(keys), []
        for key in keys:
            prefix = key
            while prefix not in place:
                if not prefix:
                    raise RowsError(f"No row here is, or is the parent of, the row {key}.", have=_some_keys(self.keys))
                prefix = prefix[:-1]
            index.append(place[prefix])
        return self if keys == self.keys else self._rows(index, keys)

    def filter(self, mask: Any) -> Batch:
        """Return the rows where ``mask`` (bool[], or a list of bools) is true."""
        column = Column.of(mask, dtype=None if len(mask) else "bool")
        if column.type != "bool[]":
            raise FieldError(f"A filter needs one bool per row, bool[]; this is {column.type}.")
        if len(column) != len(self):
            raise RowsError(f"The filter has {len(column)} rows, the batch has {len(self)}.")
        listed = column.values.nonzero()[:, 0].tolist()
        return self if len(listed) == len(self) else self._rows(listed, tuple([self.keys[i] for i in listed]))

    def sort(self) -> Batch:
        """Return the rows in the order of their keys."""
        index = sorted(range(len(self)), key=self.keys.__getitem__)
        return self._rows(index, tuple([self.keys[i] for i in index]))

    def split(self, n: int) -> list[Batch]:
        """Return n parts of neighbouring rows, their sizes differing by at most one; none is lost."""
        return self.split_sizes([len(self) // n + (i < len(self) % n) for i in range(n)])

    def split_sizes(self, sizes: Sequence[int]) -> list[Batch]:
        """Return parts of neighbouring rows, of these sizes. Raises RowsError unless they add up."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise RowsError(f"{len(self)} rows cannot be split into parts of {list(sizes)}.")
        parts, start = [], 0
        for size in sizes:
            stop, known = start + size, {}
            columns = {n: c._slice(start, stop, known) for n, c in self._columns.items()}
            parts.append(Batch._make(self.keys[start:stop], columns, self.call))
            start = stop
        return parts

    def concat(self, *others: Batch) -> Batch:
        """Return the rows of this batch and of ``others``, one after the other: the same fields, other keys."""
        batches = [self, *others]
        for other in others:
            different = sorted(set(self.fields) ^ set(other.fields))
            if different:
                raise FieldError(f"'{different[0]}' is a field of some of the batches only.", have=self.fields)
        known: dict[tuple[int, ...], Any] = {}
        columns = {n: concat(n, [b[n] for b in batches], known) for n in self._columns}
        return Batch([key for b in batches for key in b.keys], columns, self.call)

    def groups(self) -> list[list[int]]:
        """Return row numbers by prompt (the first number of the key), prompts in the order of their first row."""
        if self._groups is None:
            groups: dict[int, list[int]] = {}
            for i, key in enumerate(self.keys):
                groups.setdefault(key[0], []).append(i)
            object.__setattr__(self, "_groups", list(groups.values()))
        return [list(rows) for rows in self._groups]

    def group_index(self) -> tuple[Tensor, int]:
        """Return the number of its group for each row, i64[rows], and how many groups there are."""
        import torch

        names: dict[int, int] = {}
        numbers = [names.setdefault(key[0], len(names)) for key in self.keys]
        return torch.tensor(numbers, dtype=torch.int64), len(names)

    def group_reduce(self, column: Column | str, how: str) -> Column:
        """Return ``mean`` or ``std`` over the rows of the same prompt, for each of them: f32[].

        The standard deviation is without Bessel's correction.
        """
        import torch

        column = self[column] if isinstance(column, str) else column
        values = column._numbers()
        if column.lengths is not None or values.dim() != 1:
            raise FieldError(
                f"Groups are reduced over one number per row; this is {column.type}.", fix="Use row_mean()."
            )
        if how not in ("mean", "std"):
            raise FieldError(f"'{how}' is no reduction of groups.", have=("mean", "std"))
        index, count = self.group_index()
        sizes, index = torch.bincount(index, minlength=count), index.to(values.device)
        order = index.argsort(stable=True)
        per_group = sizes.to(values.device)
        mean = (segment_sums(values[order], sizes) / per_group)[index]
        if how == "mean":
            return Column(mean.float())
        square = (values - mean).square()
        return Column((segment_sums(square[order], sizes) / per_group)[index].sqrt().float())

    def group_mean(self, name: str) -> Column:
        """Return the mean of a field f32[] over the rows of the same prompt, for each of them: f32[]."""
        return self.group_reduce(name, "mean")

    def group_std(self, name: str) -> Column:
        """Return the std of a field f32[] over the rows of the same prompt, without Bessel's correction."""
        return self.group_reduce(name, "std")

    def expand(self, n: int) -> Batch:
        """Return every row n times, its copies side by side under the keys (..., 0), (..., 1), ..."""
        if n < 0:
            raise RowsError(f"A row cannot be there {n} times.")
        keys = tuple([(*key, i) for key in self.keys for i in range(n)])
        return self._rows([i for i in range(len(self)) for _ in range(n)], keys)

    def count(self) -> int:
        """Return the number of rows."""
        return len(self)

    def row_seeds(self, *extra: int | str) -> Tensor:
        """Return a seed per row, i64[rows] of 63 bits: a hash of the call, ``extra`` and the row's key alone."""
        import torch

        c = self.call or CallInfo()
        prefix = hashlib.blake2b(repr((c.seed, c.program, c.step, c.op, c.occurrence, *extra)).encode(), digest_size=8)
        seeds = []
        for key in self.keys:
            h = prefix.copy()
            h.update(repr(key).encode())
            seeds.append(int.from_bytes(h.digest(), "little") >> 1)
        return torch.tensor(seeds, dtype=torch.int64)

    def to(self, device: Any) -> Batch:
        """Return the batch with its tensors on ``device``."""
        return self._with({name: column.to(device) for name, column in self._columns.items()})

    def to_record(self) -> dict[str, Any]:
        """Return a JSON record that :meth:`from_record` turns back into the same bits (without ``call``)."""
        for name, c in self._columns.items():
            if isinstance(c.values, list):
                _json(name, c.values)
        columns = {name: c.to_record() for name, c in self._columns.items()}
        return {"keys": [list(key) for key in self.keys], "columns": columns}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Batch:
        """Return the batch that :meth:`to_record` wrote."""
        columns = {name: Column.from_record(c) for name, c in record["columns"].items()}
        return Batch([tuple(key) for key in record["keys"]], columns)

    def digest(self) -> str:
        """Return a sha256 over keys and contents, whatever the order of the fields."""
        total = hashlib.sha256(json.dumps(self.keys).encode())
        for name in sorted(self._columns):
            c = self._columns[name]
            shape = [] if isinstance(c.values, list) else list(c.values.shape)
            total.update(json.dumps([name, c.type, shape]).encode())
            if c.lengths is not None:
                total.update(raw_bytes(c.lengths))
            total.update(_json(name, c.values).encode() if isinstance(c.values, list) else raw_bytes(c.values))
        return total.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, none sharing memory with another, for safetensors. :meth:`meta` is the rest."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, c in self._columns.items():
            if isinstance(c.values, list):
                continue
            parts = {"values": c.values} if c.lengths is None else {"values": c.values, "lengths": c.lengths}
            for part, tensor in parts.items():
                memory = tensor.untyped_storage().data_ptr()
                tensors[f"{part}/{name}"] = tensor.clone() if memory in seen else tensor.contiguous()
                seen.add(memory)
        return tensors

    def meta(self) -> dict[str, Any]:
        """Return what :meth:`tensors` leaves out, as a JSON record."""
        columns: dict[str, Any] = {}
        for name, c in self._columns.items():
            columns[name] = {"values": list(c.values)} if isinstance(c.values, list) else {"dim": c.dim}
            if c.marks:
                columns[name]["marks"] = sorted(map(list, c.marks))
        return {"keys": [list(key) for key in self.keys], "columns": columns}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Batch:
        """Return the batch of :meth:`tensors` and :meth:`meta`."""
        columns: dict[str, Column] = {}
        for name, c in meta["columns"].items():
            if "values" in c:
                columns[name] = Column(list(c["values"]), marks=read_marks(c))
            else:
                lengths = tensors.get(f"lengths/{name}")
                columns[name] = Column(tensors[f"values/{name}"], lengths, c["dim"], read_marks(c))
        return Batch([tuple(key) for key in meta["keys"]], columns)


def _json(name: str, values: list[Any]) -> str:
    try:
        return json.dumps(values, sort_keys=True)
    except (TypeError, ValueError) as cause:
        raise FieldError(
            f"'{name}' cannot be written down: {cause}.", fix="Keep texts, numbers, lists and dicts."
        ) from cause


def already_there(title: str, name: str) -> FieldError:
    """The error of ``with_columns`` and ``rename`` where a batch has a field of that name."""
    return FieldError(
        f"{title} adds '{name}', which the batch already has.",
        fix=f"Write batch.drop('{name}').{title}(...) if it takes the place of that one, or give it another name.",
    )


def _twice(items: Sequence[Any]) -> Any:
    seen: set[Any] = set()
    return next(x for x in items if x in seen or seen.add(x))


def _some_keys(keys: Iterable[Key]) -> str:
    keys = list(keys)
    return ", ".join(map(str, keys[:3])) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _different_rows(left: tuple[Key, ...], right: tuple[Key, ...]) -> RowsError:
    missing, extra = set(left) - set(right), set(right) - set(left)
    parts = [
        f"only {side} has {_some_keys(sorted(k))}" for side, k in (("the left", missing), ("the right", extra)) if k
    ]
    return RowsError(f"Two batches of different rows: {'; '.join(parts)}.", fix="Filter both, or neither.")


__all__ = ["Batch", "CallInfo", "Column", "Key"]
