"""Whether what an engine has answered can be right: all rows that were asked for, whole, finite, of known versions."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ...errors import WrongAnswer
from ..model_options import Sampled

if TYPE_CHECKING:
    from ...batch import Column, Key
    from ..streaming import SampledRow


def check_sampled(sampled: Sampled, keys: Sequence[Key], version: int) -> None:
    """Raise WrongAnswer, which names the row, for an answer that cannot be right.

    ``keys`` are those of the rows that were asked for, ``version`` is that of the weights. Tokens may be of older
    versions, where a publish came in between, and later ones of a row are of no older version than those before.
    """
    ids, rows = sampled.ids, len(keys)
    if len(ids) != rows:
        first = f": there is none for row {_name(keys[len(ids)])}" if len(ids) < rows else ""
        raise WrongAnswer(f"{len(ids)} rows were sampled, and {rows} were asked for{first}.")
    for name in ("rollout_logprobs", "sampling_logprobs"):
        column: Column = getattr(sampled, name)
        _check_lengths(column, name, keys, ids)
        _check_finite(column, name, keys)
    if len(sampled.finished) != rows:
        raise WrongAnswer(f"{len(sampled.finished)} rows say how they ended, and {rows} were asked for.")
    if sampled.support is not None:
        _check_lengths(sampled.support[1], "support_sizes", keys, ids)
    if sampled.versions is not None:
        _check_lengths(sampled.versions, "versions", keys, ids)
        _check_versions(sampled.versions, keys, version)


def check_row(row: SampledRow, version: int) -> None:
    """Raise WrongAnswer for a row that left its engine on its own, as :func:`check_sampled` does for whole calls.

    Engines count versions where they are published to while rows run; a row of a single version is not looked at.
    """
    for name in ("rollout_logprobs", "sampling_logprobs"):
        numbers: tuple[float, ...] = getattr(row, name)
        if len(numbers) != len(row.ids):
            raise WrongAnswer(f"'{name}' of row {row.row} has {len(numbers)} numbers for {len(row.ids)} tokens.")
        if not all(map(isfinite, numbers)):
            token = next(i for i, number in enumerate(numbers) if not isfinite(number))
            raise WrongAnswer(f"'{name}' of row {row.row}, token {token}, is {numbers[token]}.")
    if row.support is not None and len(row.support.sizes) != len(row.ids):
        raise WrongAnswer(f"the support of row {row.row} has {len(row.support.sizes)} places, not {len(row.ids)}.")
    versions = [version for version, _ in row.versions]
    if sum(tokens for _, tokens in row.versions) != len(row.ids):
        raise WrongAnswer(f"'versions' of row {row.row} are {row.versions} for {len(row.ids)} tokens.")
    if len(versions) > 1 and (max(versions) > version or versions != sorted(versions)):
        raise WrongAnswer(f"the tokens of row {row.row} are of versions {versions}, and the weights are {version}.")


def _check_lengths(column: Column, name: str, keys: Sequence[Key], ids: Column) -> None:
    """Every token has one number."""
    if len(column) != len(ids):
        raise WrongAnswer(f"'{name}' has {len(column)} rows for {len(ids)} that were sampled.")
    other = (column.lengths != ids.lengths).nonzero()
    if len(other):
        row = int(other[0])
        raise WrongAnswer(
            f"'{name}' of row {_name(keys[row])} has {int(column.lengths[row])} numbers for "
            f"{int(ids.lengths[row])} tokens."
        )


def _check_finite(column: Column, name: str, keys: Sequence[Key]) -> None:
    """Every log-probability is a number."""
    wrong = (~column.values.isfinite()).nonzero()
    if len(wrong):
        row, token = _place(column, int(wrong[0]))
        value = float(column.values[int(wrong[0])])
        raise WrongAnswer(f"'{name}' of row {_name(keys[row])}, token {token}, is {value}.")


def _check_versions(versions: Column, keys: Sequence[Key], version: int) -> None:
    """Tokens are of versions that there were, in their order."""
    late = (versions.values > version).nonzero()
    if len(late):
        at = int(late[0])
        row, token = _place(versions, at)
        what = f"token {token} of row {_name(keys[row])} is of version {int(versions.values[at])}"
        raise WrongAnswer(f"{what}, and the weights are version {version}.")
    back = versions.values[1:] < versions.values[:-1]
    if bool(back.any()):
        first = versions.offsets[1:-1] - 1  # from the last token of a row to the first of the next one it may fall
        back[first[(first >= 0) & (first < len(back))]] = False
        if bool(back.any()):
            row, token = _place(versions, int(back.nonzero()[0]) + 1)
            raise WrongAnswer(f"token {token} of row {_name(keys[row])} is of an older version than before.")


def _place(column: Column, at: int) -> tuple[int, int]:
    """Return row and token of a number."""
    import torch

    row = int(torch.searchsorted(column.offsets, at, right=True)) - 1
    return row, at - int(column.offsets[row])


def _name(key: Key) -> str:
    return ".".join(map(str, key))
