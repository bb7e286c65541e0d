"""What one field of all rows is: a tensor packed along its ragged dim, never padded; and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import DataError, FieldError, RowsError
from ..marks import UNMARKED, Marks, kind_said, logprob_kind
from .elementwise import binary, same_lengths, unary
from .tensors import (
    as_tensor,
    decoded,
    dtype_names,
    dtypes,
    encoded,
    from_array,
    row_ends,
    row_sums,
    same_bits,
    to_array,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Column:
    """One field of all rows: ``Column.of([[1, 2], [], [3]], dim="response", dtype="i32")``.

    ``values``: a tensor [total, ...] for a ragged column (its rows one after the other), [rows, ...] for a
    fixed one, a list of objects for ``any``. ``lengths``: i64[rows] on the CPU, and ``dim``, the name of the
    ragged dim; None where there is none. ``type`` is ``i32[*response]``, ``f32[]``, ``any`` or the like. ``marks`` say
    where it comes from (:mod:`flowrl.marks`); what holds the same rows, or some of them, has them too.
    Arithmetic and comparisons are per element; a number or a fixed column is spread over a ragged one.

    >>> column = fl.Column.of([[1, 2], [], [3]], dim="response", dtype="i32")
    >>> column.type, column.to_list(), column.lengths.tolist()
    ('i32[*response]', [[1, 2], [], [3]], [2, 0, 1])
    >>> (column * 10).row_sum().to_list()
    [30.0, 0.0, 30.0]
    """

    values: Any
    lengths: Any = None
    dim: str | None = None
    marks: Marks = UNMARKED
    _offsets: Any = field(default=None, init=False)

    @staticmethod
    def of(data: Any, dim: str | None = None, dtype: str | None = None) -> Column:
        """Return a column from a column, a tensor, or a list of numbers, texts, objects, lists or tensors.

        With ``dim`` every item is a row of a ragged column. Whole numbers become i64, others f32.
        """
        if isinstance(data, Column):
            values = data.values if dtype in (None, data.dtype) else as_tensor(data.values, dtype)
            named = data.dim if data.lengths is None else dim or data.dim
            same = values is data.values and named == data.dim
            return data if same else Column(values, data.lengths, named, data.marks)
        if not hasattr(data, "shape"):  # neither a tensor nor an array
            data = list(data)
            if dtype == "any":
                return Column(data)
            if dim is not None:
                return _ragged(data, dim, dtype)
            if dtype is None and not _numbers(data):
                return _stacked(data)
        values = as_tensor(data, dtype)
        if dim is None:
            return Column(values)
        if values.dim() < 2:
            raise FieldError(
                f"A tensor of shape {list(values.shape)} has no dim '{dim}'.",
                fix="Use Column.packed for packed rows.",
            )
        rows, length = values.shape[:2]
        return Column.packed(values.flatten(0, 1), [length] * rows, dim)

    @staticmethod
    def packed(values: Tensor, lengths: Any, dim: str) -> Column:
        """Return a ragged column over ``values`` [total, ...], not copied. Raises RowsError unless lengths add up."""
        import torch

        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if int(lengths.sum()) != values.shape[0]:
            raise RowsError(f"*{dim}: {values.shape[0]} values, but the lengths add up to {int(lengths.sum())}.")
        return Column(values, lengths, dim)

    @property
    def dtype(self) -> str:
        return "any" if isinstance(self.values, list) else dtype_names()[self.values.dtype]

    @property
    def type(self) -> str:
        """The field type as it is written in signatures: ``f32[*response]``."""
        if isinstance(self.values, list):
            return "any"
        dims = [] if self.dim is None else [f"*{self.dim}"]
        return f"{self.dtype}[{', '.join([*dims, *map(str, self.values.shape[1:])])}]"

    @property
    def kind(self) -> str:
        """Of what kind log-probabilities are; empty for other columns.

        Such as ``by actor.generate, at temperature 0.6, cut by top_p=0.9, computed in f32``.
        """
        return kind_said(self.marks)

    @property
    def offsets(self) -> Tensor:
        """Where each row begins in ``values``, and the end: i64[rows + 1]."""
        offsets = self._offsets
        if offsets is None:
            offsets = row_ends(self._ragged().lengths)
            object.__setattr__(self, "_offsets", offsets)
        return offsets

    def __len__(self) -> int:
        return len(self.values) if self.lengths is None else len(self.lengths)

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            start, stop, step = i.indices(len(self))
            if step != 1:
                return self.take(range(start, stop, step))
            return self._slice(start, max(start, stop), {})
        rows = len(self)
        if not -rows <= i < rows:
            raise IndexError(f"row {i} of {rows}")
        i %= rows
        if self.lengths is not None:
            offsets = self.offsets
            return self.values[int(offsets[i]) : int(offsets[i + 1])]
        item = self.values[i]
        return item.item() if not isinstance(self.values, list) and item.dim() == 0 else item

    def __iter__(self) -> Iterator[Any]:
        if self.lengths is not None:
            return iter(self.values.split(self.lengths.tolist()) if len(self) else ())
        if isinstance(self.values, list):
            return iter(self.values)
        return iter(self.values.tolist() if self.values.dim() == 1 else self.values.unbind())

    def to_list(self) -> list[Any]:
        """Return the rows as Python objects, a list per row where the column is ragged."""
        if isinstance(self.values, list):
            return list(self.values)
        flat = self.values.tolist()
        if self.lengths is None:
            return flat
        ends = self.offsets.tolist()
        return [flat[a:b] for a, b in pairwise(ends)]

    def __repr__(self) -> str:
        return f"<Column {self.type}, {len(self)} rows>"

    def equal(self, other: Column) -> bool:
        """Return whether both hold the same bits: type, lengths and values; nan equals nan, 0.0 is not -0.0."""
        if self is other:
            return True
        if self.type != other.type or len(self) != len(other):
            return False
        if isinstance(self.values, list):
            return self.values == other.values
        if self.lengths is not None and not same_lengths(self, other):
            return False
        return self.values.shape == other.values.shape and same_bits(self.values, other.values)

    def take(self, index: Any) -> Column:
        """Return the rows of ``index`` (numbers from 0), in its order; a row may come twice."""
        return self._take(row_index(index), {})

    def _take(self, index: Tensor, known: dict[int, Any]) -> Column:
        """``known`` keeps what columns of one lengths tensor share: new lengths and positions."""
        if isinstance(self.values, list):
            return Column([self.values[i] for i in index.tolist()], marks=self.marks)
        device = self.values.device
        if self.lengths is None:
            return Column(self.values.index_select(0, index.to(device)), marks=self.marks)
        shared = known.get(id(self.lengths))
        if shared is None:
            import torch

            lengths = self.lengths.index_select(0, index)
            ends = row_ends(lengths)
            total = int(ends[-1])
            shift = self.offsets[:-1].index_select(0, index).sub_(ends[:-1])
            positions = torch.arange(total) + shift.repeat_interleave(lengths, output_size=total)
            shared = known[id(self.lengths)] = (lengths, positions.to(device))
        return Column(self.values.index_select(0, shared[1].to(device)), shared[0], self.dim, self.marks)

    def _slice(self, start: int, stop: int, known: dict[int, Any]) -> Column:
        """Neighbouring rows, without a copy. ``known`` keeps what columns of one lengths tensor share."""
        if self.lengths is None:
            return Column(self.values[start:stop], marks=self.marks)
        shared = known.get(id(self.lengths))
        if shared is None:
            ends = self.offsets
            shared = known[id(self.lengths)] = (int(ends[start]), int(ends[stop]), self.lengths[start:stop])
        return Column(self.values[shared[0] : shared[1]], shared[2], self.dim, self.marks)

    def padded(self, value: float, side: str = "right") -> tuple[Tensor, Tensor]:
        """Return a tensor [rows, longest, ...] filled with ``value`` on ``side``, and a bool mask of what is real."""
        import torch

        lengths = self._ragged().lengths.to(self.values.device)
        longest = int(self.lengths.max()) if len(self) else 0
        place = torch.arange(longest, device=lengths.device)
        mask = place < lengths[:, None] if side == "right" else place >= longest - lengths[:, None]
        shape, rest = (len(self), longest), self.values.shape[1:]
        out = self.values.new_full((*shape, *rest), value)
        return out.masked_scatter(mask.reshape(*shape, *[1] * len(rest)).expand_as(out), self.values), mask

    def to_record(self) -> dict[str, Any]:
        """Return the column as a JSON record, to the bit."""
        marks = {"marks": sorted(map(list, self.marks))} if self.marks else {}
        if isinstance(self.values, list):
            return {"values": list(self.values), **marks}
        record = {"dtype": self.dtype, "shape": list(self.values.shape), "data": encoded(self.values), **marks}
        return record if self.lengths is None else {**record, "dim": self.dim, "lengths": encoded(self.lengths)}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Column:
        """Return the column that :meth:`to_record` wrote."""
        marks = read_marks(record)
        if "values" in record:
            return Column(list(record["values"]), marks=marks)
        lengths = decoded(record["lengths"], "i64") if "lengths" in record else None
        values = decoded(record["data"], record["dtype"]).reshape(record["shape"])
        return Column(values, lengths, record.get("dim"), marks)

    def to(self, device: Any) -> Column:
        """Return the column with its values on ``device``; lengths stay on the CPU."""
        if isinstance(self.values, list):
            return self
        return Column(self.values.to(device), self.lengths, self.dim, self.marks)

    def marked(self, marks: Marks) -> Column:
        """Return the same column with these marks and no others."""
        return self if marks == self.marks else Column(self.values, self.lengths, self.dim, marks)

    def with_values(self, values: Tensor) -> Column:
        """Return a column of the same rows and lengths around other values."""
        if len(values) != len(self.values):
            raise RowsError(f"{self.type} has {len(self.values)} values; {len(values)} cannot take their place.")
        return Column(values, self.lengths, self.dim)

    __add__, __radd__ = binary("add"), binary("add", reflected=True)
    __sub__, __rsub__ = binary("sub"), binary("sub", reflected=True)
    __mul__, __rmul__ = binary("mul"), binary("mul", reflected=True)
    __truediv__, __rtruediv__ = binary("truediv"), binary("truediv", reflected=True)
    __floordiv__, __rfloordiv__ = binary("floordiv"), binary("floordiv", reflected=True)
    __mod__, __rmod__ = binary("mod"), binary("mod", reflected=True)
    __pow__, __rpow__ = binary("pow"), binary("pow", reflected=True)
    __and__, __rand__ = binary("and_"), binary("and_", reflected=True)
    __or__, __ror__ = binary("or_"), binary("or_", reflected=True)
    __lt__, __le__, __gt__, __ge__ = binary("lt"), binary("le"), binary("gt"), binary("ge")
    __eq__, __ne__ = binary("eq"), binary("ne")  # type: ignore[assignment]
    __neg__, __abs__, __invert__ = unary("neg"), unary("abs"), unary("invert")
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.values, list):
            return Column, (self.values, None, None, self.marks)
        lengths = None if self.lengths is None else self.lengths.numpy()
        return _from_arrays, (to_array(self.values), self.dtype, lengths, self.dim, self.marks)

    def __bool__(self) -> bool:
        raise FieldError(
            f"A column ({self.type}) is neither true nor false.", fix="Reduce it: .mean(), .min(), .max()."
        )

    def _ragged(self) -> Column:
        if self.lengths is None:
            raise FieldError(f"{self.type} has no ragged dim.")
        return self

    def _numbers(self) -> Tensor:
        return as_tensor(self.values, "f64")

    def mean(self) -> float:
        """Return the mean over all elements; of none it is 0."""
        return float(self._numbers().mean()) if len(self.values) else 0.0

    def sum(self) -> float:
        return float(self._numbers().sum())

    def std(self) -> float:
        """Return the standard deviation over all elements, without Bessel's correction; of none it is 0."""
        return float(self._numbers().std(correction=0)) if len(self.values) else 0.0

    def min(self) -> float:
        """Return the smallest element. Raises DataError where there is none."""
        return float(self._some().min())

    def max(self) -> float:
        """Return the largest element. Raises DataError where there is none."""
        return float(self._some().max())

    def _some(self) -> Tensor:
        if not len(self.values):
            raise DataError(
                f"{self.type}: no element, so none is the smallest or largest.",
                fix="Test batch.count() first.",
            )
        return self._numbers()

    def row_sum(self) -> Column:
        """Return the sum per row, f32[]; 0 for an empty row."""
        return Column(row_sums(self._numbers(), self.lengths).float(), marks=logprob_kind(self.marks))

    def row_mean(self) -> Column:
        """Return the mean per row, f32[]; 0 for an empty row."""
        values = self._numbers()
        counts = values[:1].numel() or 1
        sums = row_sums(values, self.lengths)
        if self.lengths is not None:
            counts = self.lengths.clamp(min=1).to(sums.device) * counts
        return Column((sums / counts).float(), marks=logprob_kind(self.marks))

    def lengths_column(self) -> Column:
        """Return the length per row, i64[]."""
        return Column(self._ragged().lengths)


def read_marks(record: Mapping[str, Any]) -> Marks:
    """The marks of a column that was written down."""
    return frozenset((kind, value) for kind, value in record.get("marks", ()))


def _numbers(data: list[Any]) -> bool:
    """Whether a list can be a tensor of numbers as it is."""
    return all(isinstance(x, (int, float)) for x in data)


def _stacked(data: list[Any]) -> Column:
    """Tensors of one shape become a tensor, anything else stays a list of objects."""
    import torch

    if not data or not all(isinstance(x, torch.Tensor) for x in data):
        return Column(data)
    if len({x.shape for x in data}) > 1:
        raise FieldError(
            "Tensors of different lengths make a ragged column.", fix="Name the ragged dim: dim='response'."
        )
    return Column(as_tensor(torch.stack(data), None))


def _ragged(rows: list[Any], dim: str, dtype: str | None) -> Column:
    import torch

    lengths = [len(row) for row in rows]
    if rows and all(hasattr(row, "shape") for row in rows):
        values = as_tensor(torch.cat([torch.as_tensor(row) for row in rows]), dtype)
    else:
        values = as_tensor([x for row in rows for x in (row.tolist() if hasattr(row, "tolist") else row)], dtype)
    return Column.packed(values, lengths, dim)


def row_index(index: Any) -> Tensor:
    """Numbers of rows, from 0, as a tensor: i64 on the CPU."""
    import torch

    if isinstance(index, range):
        index = list(index)
    return torch.as_tensor(index.values if isinstance(index, Column) else index, dtype=torch.int64, device="cpu")


def concat(name: str, columns: list[Column], known: dict[tuple[int, ...], Any]) -> Column:
    """The rows of columns of one type, one after the other; ``name`` is that of the field, in a message.

    ``known`` keeps what columns of one lengths tensor share: the lengths of all.
    """
    import torch

    types = {c.type for c in columns}
    if len(types) > 1:
        raise FieldError(f"'{name}' has different types: {', '.join(sorted(types))}.")
    marks = UNMARKED.union(*(c.marks for c in columns))
    if isinstance(columns[0].values, list):
        return Column([x for c in columns for x in c.values], marks=marks)
    values = torch.cat([c.values for c in columns])
    if columns[0].lengths is None:
        return Column(values, marks=marks)
    shared = tuple(id(c.lengths) for c in columns)  # columns that had one lengths tensor have one again
    if shared not in known:
        known[shared] = torch.cat([c.lengths for c in columns])
    return Column(values, known[shared], columns[0].dim, marks)


def _from_arrays(values: Any, dtype: str, lengths: Any, dim: str | None, marks: Marks = UNMARKED) -> Column:
    """The column of :func:`_array`. It may lie in memory that others read too: columns never change."""
    tensor = from_array(values)
    tensor = tensor if tensor.dtype == dtypes()[dtype] else tensor.view(dtypes()[dtype])
    return Column(tensor, from_array(lengths), dim, marks)
