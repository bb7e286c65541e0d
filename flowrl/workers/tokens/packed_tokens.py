"""Packed token columns put together row by row, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...batch import Column
from ...marks import Marks

if TYPE_CHECKING:
    import torch

    from ...batch import Batch


def append(first: Column, second: Column, *, dim: str) -> Column:
    """Row i of the result is row i of ``first`` followed by row i of ``second``."""
    import torch

    a, b = _lengths(first), _lengths(second)
    total = a + b
    starts = torch.cumsum(total, 0) - total
    values = first.values.new_empty(int(total.sum()))
    values[_places(starts, a).to(values.device)] = first.values
    values[_places(starts + a, b).to(values.device)] = second.values.to(values)
    return Column.packed(values, total, dim)


def constant(like: Column, value: Any, dtype: str) -> Column:
    """A column of the same rows and lengths that holds ``value`` everywhere."""
    import torch

    kinds = {"bool": torch.bool, "i32": torch.int32, "f32": torch.float32}
    return Column.packed(
        torch.full_like(like.values, value, dtype=kinds[dtype]), _lengths(like), like.dim or "response"
    )


def marked(columns: Mapping[str, Any], marks: Mapping[str, Marks]) -> dict[str, Any]:
    """The columns with the marks that are given for their names."""
    return {name: c.marked(marks[name]) if name in marks else c for name, c in columns.items()}


def masked(batch: Batch, loss: Any) -> Batch:
    """The rows as ``loss`` trains them: those that its ``where`` leaves out have no sampled token."""
    import torch

    where: str = getattr(loss, "where", "")
    if not where:
        return batch
    mask = batch["response_mask"]
    kept = batch[where].values.to(mask.values.device)
    inside = mask.values & torch.repeat_interleave(kept, _lengths(mask).to(kept.device))
    return batch.drop("response_mask").with_columns({"response_mask": mask.with_values(inside)})


def pack(rows: Iterable[Sequence[int]], dim: str) -> Column:
    """A ragged column i32 of token ids from lists, one per row; rows may be empty."""
    import numpy as np
    import torch

    ids, lengths = list[int](), list[int]()
    for row in rows:
        ids += row
        lengths.append(len(row))
    return Column.packed(torch.from_numpy(np.array(ids, dtype=np.int32)), lengths, dim)


def _lengths(column: Column) -> torch.Tensor:
    assert column.lengths is not None, "token columns are ragged"
    return column.lengths


def _places(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Positions of the elements of rows that start at ``starts``."""
    import torch

    own = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - own, lengths)
