"""How fields of derived rows, such as a judge's verdicts, become fields of the rows that they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import FieldError, ProgramError, RowsError, near
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Key

HOW = ("mean", "sum", "min", "max")


def _reads(shape: CallShape) -> Mapping[str, str]:
    fields: Mapping[str, Any] = shape.call.get("fields") or {}
    if not fields:
        raise ProgramError("rl.collect names no field.", fix='Write rl.collect(batch, said, rewards="mean").')
    for name, how in fields.items():
        if how not in HOW:
            meant = near(str(how), HOW) or "mean"
            raise ProgramError(
                f"rl.collect: {name}={how!r} is none of {', '.join(HOW)}.", fix=f'Write {name}="{meant}".'
            )
    return {"batch": "", "children": ", ".join(fields)}


def _adds(shape: CallShape) -> str:
    return ", ".join(f"{name}: f32[]" for name in shape.call.get("fields") or {})


@op(owner="rl", reads=_reads, adds=_adds, cost="local", children="children")
def collect(batch: Batch, children: Batch, **fields: str) -> Mapping[str, Any]:
    """Adds fields of rows that were made of those of the batch, one number for each row: ``rewards="mean"``.

    A row of ``children`` belongs to the row whose key its own begins with. So the verdicts of a judge, asked some times
    about every answer, become the answer's reward::

        said = verdict.score(judge.generate(judge.ask(batch, "Is {response} right?"), n=4))
        batch = rl.collect(batch, said, rewards="mean")

    Rows of ``children`` whose own row is not in the batch any more are left out. Raises RowsError for a row that has
    none, FieldError for a field that is not one number per row.

    Args:
        batch: the rows that get the fields.
        children: rows that were made of them; reads the named fields.
        fields: for each field ``mean``, ``sum``, ``min`` or ``max`` over the rows that belong together.

    >>> batch = fl.Batch.of([(0, 0), (0, 1)], answer=["4", "5"])
    >>> verdicts = fl.Batch.of([(0, 0, 0), (0, 0, 1), (0, 1, 0)], rewards=[1.0, 0.0, 1.0])
    >>> rl.collect(batch, verdicts, rewards="mean").rewards.to_list()
    [0.5, 1.0]
    """
    import torch

    place = {key: row for row, key in enumerate(batch.keys)}
    parents = [_parent(key, place) for key in children.keys]
    kept = torch.tensor([row for row, parent in enumerate(parents) if parent is not None], dtype=torch.int64)
    owner = torch.tensor([parent for parent in parents if parent is not None], dtype=torch.int64)
    counts = torch.bincount(owner, minlength=len(batch))
    if len(batch) and not bool(counts.all()):
        lacking = batch.keys[int((counts == 0).nonzero()[0])]
        raise RowsError(
            f"rl.collect: no row was made of the row {lacking}.",
            fix="Make rows of every row of the batch, or filter both alike.",
        )
    found: dict[str, Any] = {}
    for name, how in fields.items():
        column = children[name]
        if column.lengths is not None or isinstance(column.values, list) or column.values.dim() != 1:
            raise FieldError(
                f"rl.collect: '{name}' is {column.type}, and one number per row is wanted.",
                fix="Reduce it first: .row_sum() or .row_mean().",
            )
        found[name] = _reduced(column.values.cpu().double()[kept], owner, counts, how).float()
    return found


def _parent(key: Key, place: Mapping[Key, int]) -> int | None:
    """The row whose key this one begins with, the nearest if there are several."""
    for length in range(len(key), 0, -1):
        if key[:length] in place:
            return place[key[:length]]
    return None


def _reduced(values: Tensor, owner: Tensor, counts: Tensor, how: str) -> Tensor:
    """The values of each owner as one number, f64[rows]."""
    import torch

    whole = torch.zeros(len(counts), dtype=torch.float64)
    if how in ("min", "max"):
        return whole.scatter_reduce(0, owner, values, f"a{how}", include_self=False)
    total = whole.index_add(0, owner, values)
    return total / counts if how == "mean" else total
