"""What is said where a model gives numbers that are not finite: which weights are not, or which fields it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import NotFinite
from ...workers.user_code.rows_in_progress import named_row
from .parameters import Parameters

_FEW = 3  # names that are told
_MEND = (
    "Remove the newest folder of checkpoints/ and go on with --resume from the one before; train with a smaller lr or "
    "grad_clip, or in fp32."
)


def check_finite(what: str, found: Tensor, parameters: Parameters, *, least: bool = True) -> None:
    """Raise NotFinite where numbers that depend on the weights alone are not finite. ``least``: nor may they be -inf.

    Only then are the weights looked at.
    """
    bad = ~torch.isfinite(found) if least else found.isnan() | found.isposinf()
    if bool(bad.any()):
        raise not_finite(f"{int(bad.sum())} of {bad.numel()} {what} are not finite", parameters)


def not_finite(what: str, parameters: Parameters, batch: Batch | None = None) -> NotFinite:
    """The error of a result that is not finite: for its weights, else for the fields of ``batch``, else for neither."""
    names, said = _weights(parameters)
    if names:
        return NotFinite(f"{what}: {said}, {parameters.since}.", names=names, fix=_MEND)
    names, said = _fields(batch)
    if names:
        fix = "Leave such rows out, with batch.filter(...), or mend what makes them."
        return NotFinite(f"{what}: {said}; the weights were left alone.", names=names, fix=fix)
    return NotFinite(
        f"{what}; the weights were left alone.",
        fix="Look for fields that are not finite, or train with a smaller lr or in fp32.",
    )


def _weights(parameters: Parameters) -> tuple[list[str], str]:
    """The names of weights here that are not finite, and how they are told."""
    shards = parameters.shards()
    bad = {s.name: count for s in shards if (count := int((~torch.isfinite(s.tensor)).sum()))}
    sizes = {s.name: s.tensor.numel() for s in shards}
    listed = [f"{name} ({count} of {sizes[name]} numbers)" for name, count in list(bad.items())[:_FEW]]
    more = f" and {len(bad) - _FEW} more" if len(bad) > _FEW else ""
    return list(bad), f"{len(bad)} of {len(shards)} weights are not finite, {', '.join(listed)}{more}"


def _fields(batch: Batch | None) -> tuple[list[str], str]:
    """The names of the fields that are not finite, and how they are told: each with its first row."""
    found: dict[str, str] = {}
    for name in batch.fields if batch is not None else ():
        column: Column = batch[name]  # type: ignore[index]
        values: Any = column.values
        if isinstance(values, list) or not values.is_floating_point() or bool(torch.isfinite(values).all()):
            continue
        first = int((~torch.isfinite(values)).flatten(1).any(1).nonzero()[0]) if values.dim() > 1 else _first(values)
        row = first if column.lengths is None else int(torch.searchsorted(column.offsets, first, right=True)) - 1
        found[name] = f"the field '{name}' is not finite in row {named_row(batch.keys[row])}"  # type: ignore[union-attr]
    return list(found), ", ".join(found.values())


def _first(values: Tensor) -> int:
    return int((~torch.isfinite(values)).nonzero()[0])
