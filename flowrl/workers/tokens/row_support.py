"""Which tokens could be drawn at each place of a row, kept as the row is sampled, and as columns of a call."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...batch import Column
from ...errors import DataError

#: How many token ids one call records at most: 1 GiB of them.
MOST_IDS = 1 << 28


def too_many(rows: int, tokens: int, ids: int) -> DataError:
    """Return the error of a call that records more ids than are kept."""
    return DataError(
        f"support=True: the first {tokens} tokens of {rows} rows have a support of {ids} ids, and at most {MOST_IDS} "
        "are kept.",
        fix="Give top_k= as well, such as top_k=100, which bounds how many a token has; or sample fewer rows.",
    )


@dataclass(slots=True)
class CallSupport:
    """How much the rows of one call have recorded: ``CallSupport(rows=8)``."""

    rows: int
    tokens: int = 0  # of the row that has most
    ids: int = 0

    def count(self, tokens: int, ids: int) -> None:
        """Count a row's token, its number and its ids. Raises DataError where they become too many."""
        self.tokens, self.ids = max(self.tokens, tokens), self.ids + ids
        if self.ids > MOST_IDS:
            raise too_many(self.rows, self.tokens, self.ids)


@dataclass(frozen=True, slots=True)
class RowSupport:
    """Ids that could be drawn, place by place, and how many each place has; 0 is the whole vocabulary.

    ``RowSupport(array("i", [4, 7, 2]), array("i", [2, 0, 1]))``: 4 or 7, any token, 2.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    sizes: array[int] = field(default_factory=lambda: array("i"))

    def add(self, ids: Sequence[int]) -> None:
        """Record the next place; no ids are all."""
        self.ids.extend(ids)
        self.sizes.append(len(ids))

    def since(self, place: int) -> RowSupport:
        """Return a copy of what was recorded from a place on.

        >>> RowSupport(array("i", [4, 7, 2]), array("i", [2, 0, 1])).since(1)
        RowSupport(ids=array('i', [2]), sizes=array('i', [0, 1]))
        """
        sizes = self.sizes[place:]
        return RowSupport(self.ids[len(self.ids) - sum(sizes) :], sizes)

    def until(self, place: int) -> RowSupport:
        """Return a copy of what was recorded before a place.

        >>> RowSupport(array("i", [4, 7, 2]), array("i", [2, 0, 1])).until(1)
        RowSupport(ids=array('i', [4, 7]), sizes=array('i', [2]))
        """
        sizes = self.sizes[:place]
        return RowSupport(self.ids[: sum(sizes)], sizes)


def support_columns(rows: Iterable[RowSupport]) -> tuple[Column, Column]:
    """``support_ids`` and ``support_sizes`` of the rows of a call.

    >>> rows = [RowSupport(array("i", [4, 7, 2]), array("i", [2, 0, 1])), RowSupport()]
    >>> [column.to_list() for column in support_columns(rows)]
    [[[4, 7, 2], []], [[2, 0, 1], []]]
    """
    import torch

    rows = list(rows)

    def column(arrays: list[array[int]], dim: str) -> Column:
        values = bytearray(b"".join(each.tobytes() for each in arrays))
        packed = torch.frombuffer(values, dtype=torch.int32) if values else torch.zeros(0, dtype=torch.int32)
        return Column.packed(packed, [len(each) for each in arrays], dim)

    return column([row.ids for row in rows], "support"), column([row.sizes for row in rows], "response")
