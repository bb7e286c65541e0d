"""Which tokens could be drawn at each place: recorded while rows are sampled, and given back as masks of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....batch import Batch, Column
from ....errors import DataError
from ....workers.tokens import row_support
from ....workers.tokens.row_support import too_many
from ..ragged import ragged_index, starts_of


@dataclass(frozen=True)
class Support:
    """Token ids, packed, that could be drawn at some places: ``Support(ids, sizes, starts)``.

    ``sizes`` and ``starts`` i64[places] say which of ``ids`` are a place's. A place of size 0 had the whole vocabulary.
    """

    ids: Tensor
    sizes: Tensor
    starts: Tensor

    @staticmethod
    def of(batch: Batch, targets: Tensor) -> Support | None:
        """That of the response tokens of rows, whose ids are ``targets``; None where the rows have none.

        Raises DataError where ``support_ids`` and ``support_sizes`` do not fit together, or lack a response token.
        """
        if "support_ids" not in batch:
            return None
        ids, each = batch["support_ids"], batch["support_sizes"]
        sizes = each.values.cpu().long()
        rows = torch.repeat_interleave(torch.arange(len(batch)), batch.response_mask.lengths)
        if not torch.equal(each.lengths, batch.response_mask.lengths) or (len(sizes) and int(sizes.min()) < 0):
            raise DataError("'support_sizes' has not one number, 0 or more, for each token of the response.", fix=_FIX)
        total = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, rows, sizes)
        if not torch.equal(total, ids.lengths):
            row = int((total != ids.lengths).nonzero()[0])
            raise DataError(
                f"Row {batch.keys[row]} has {int(ids.lengths[row])} 'support_ids', and 'support_sizes' that add up to "
                f"{int(total[row])}.",
                fix=_FIX,
            )
        found = Support(ids.values.cpu(), sizes, starts_of(sizes))
        if len(lacking := found._lacking(targets)):
            token = int(lacking[0])
            raise DataError(
                f"Row {batch.keys[int(rows[token])]} has the token {int(targets[token])}, which its support lacks: it "
                "could not have been drawn.",
                fix=_FIX,
            )
        return found

    def _lacking(self, targets: Tensor) -> Tensor:
        """Places whose own token is not among their ids."""
        place = torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes)
        hits = torch.bincount(place[self.ids == targets[place]], minlength=len(self.sizes))
        return ((hits == 0) & (self.sizes > 0)).nonzero().squeeze(-1)

    def to(self, device: torch.device) -> Support:
        return Support(self.ids.to(device), self.sizes.to(device), self.starts.to(device))

    def at(self, places: Tensor | slice) -> Support:
        """That of some of the places."""
        return Support(self.ids, self.sizes[places], self.starts[places])

    def inside(self, places: slice, width: int, first: int = 0) -> Tensor:
        """Whether each token of a part of the vocabulary, from ``first`` on, could be drawn: bool[places, width]."""
        sizes = self.sizes[places]
        ids = self.ids[ragged_index(self.starts[places], sizes)].long() - first
        place = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        here = (ids >= 0) & (ids < width)
        found = (sizes == 0)[:, None].expand(-1, width).contiguous()
        found[place[here], ids[here]] = True
        return found


_FIX = "Take both as generate(support=True) adds them, for the same tokens."


class Recorder:
    """Keeps which tokens could be drawn at each place of some rows: ``Recorder(rows=8, limit=64, device=device)``."""

    def __init__(self, rows: int, limit: int, device: torch.device) -> None:
        self.sizes = torch.zeros(rows, limit, dtype=torch.int64, device=device)
        self.starts = torch.zeros_like(self.sizes)
        self.ids: list[Tensor] = []
        self.total = 0

    def keep(self, rows: Tensor | slice, t: int, inside: Tensor) -> None:
        """Keep ``inside`` bool[rows, vocab] of place ``t``. Raises DataError where that becomes too much."""
        whole = inside.all(-1)
        inside = inside & ~whole[:, None]
        sizes, ids = inside.sum(-1), inside.nonzero()[:, 1].int()
        self.sizes[rows, t], self.starts[rows, t] = sizes, self.total + starts_of(sizes)
        self.ids.append(ids)
        self.total += len(ids)
        if self.total > row_support.MOST_IDS:
            raise too_many(len(self.sizes), t + 1, self.total)

    def packed(self, ended: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of the first ``ended`` places of each row, and how many each place has."""
        chosen = torch.arange(self.sizes.shape[1], device=ended.device) < ended[:, None]
        sizes = self.sizes[chosen]
        ids = torch.cat(self.ids) if self.ids else sizes.new_zeros(0, dtype=torch.int32)
        return ids[ragged_index(self.starts[chosen], sizes)], sizes


def columns(ids: Tensor, sizes: Tensor, places: Tensor, made: Column) -> tuple[Column, Column]:
    """``support_ids`` and ``support_sizes`` of the tokens ``made``, which are ``places`` of those that were packed."""
    own = sizes[places]
    rows = torch.repeat_interleave(torch.arange(len(made)), made.lengths)
    total = torch.zeros(len(made), dtype=torch.int64).index_add_(0, rows, own)
    found = ids[ragged_index(starts_of(sizes)[places], own)]
    return Column.packed(found, total, "support"), made.with_values(own.int())
