"""All rows of an update as every rank knows them: who has which, and what each weighs in the loss of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, CallInfo, Key
from ..errors import ProgramError, RowsError
from ..rl.loss_spec import Loss
from ..rl.math.losses import row_weights, token_weights
from .measures import repeated_grams, silent_groups, trains_policy, without_signal
from .team import Team


@dataclass(frozen=True)
class Table:
    """Rows in the order of their keys, those of all ranks: ``Table.of(team, batch, loss).mini_batches(rows=32)``.

    Numbers of rows are places in it, the same on every rank. By row: ``lengths`` i64, response tokens; ``counts`` i64,
    trained ones; ``silent`` bool, those that add nothing to the gradient; ``place`` i64, whose it is. ``mine``
    i64[local rows] are the numbers of this rank's rows, in the order of its batch. ``truncated`` is the share of rows
    that are not ``finished``, None where the rows do not say; ``silent_groups`` and ``repetition`` are what
    :mod:`flowrl.backends.measures` says of them, None where the update trains no policy, or not by advantages.
    """

    keys: tuple[Key, ...]
    lengths: Tensor
    counts: Tensor
    silent: Tensor
    place: Tensor
    mine: Tensor
    loss: Loss
    call: CallInfo | None = None
    truncated: float | None = None
    silent_groups: float | None = None
    repetition: float | None = None

    @staticmethod
    def of(team: Team, batch: Batch, loss: Loss) -> Table:
        """Ask every rank of the team for its rows.

        Raises RowsError where two have the same, ProgramError where a loss compares rows that two have.
        """
        lengths, counts, silent = _measured(batch, loss)
        call = None if batch.call is None else list(vars(batch.call).values())
        cut = None if "finished" not in batch else int((~batch["finished"].values).sum())
        more = None
        if trains_policy(loss, batch):
            silence = without_signal(batch) if loss.of_policy else None
            more = silence, repeated_grams(batch) if "tokens" in batch else (0, 0)
        mine = [list(map(list, batch.keys)), lengths.tolist(), counts.tolist(), silent.tolist(), call, cut, more]
        said = team.gather(mine)
        keys = [tuple(key) for part in said for key in part[0]]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        column = [torch.tensor([x for part in said for x in part[i]], dtype=torch.int64)[order] for i in (1, 2, 3)]
        sizes = torch.tensor([len(part[0]) for part in said])
        place = torch.repeat_interleave(torch.arange(len(said)), sizes)[order]
        number = torch.empty(len(keys), dtype=torch.int64)
        number[order] = torch.arange(len(keys))
        calls = [part[4] for part in sorted(said, key=lambda part: not part[0])]  # a rank without rows may have none
        found = Table(
            tuple(keys[i] for i in order),
            column[0],
            column[1],
            column[2].bool(),
            place,
            number[int(sizes[: team.place].sum()) :][: len(batch)],
            loss,
            next((CallInfo(*c[:-1], recorded=tuple(c[-1])) for c in calls if c is not None), None),
            _share([part[5] for part in said], len(keys)),
            *_of_policy(keys, [part[6] for part in said]),
        )
        found._check()
        return found

    def __len__(self) -> int:
        return len(self.keys)

    def mini_batches(
        self, rows: int | None = None, tokens: int | None = None, epoch: int = 0, *, together: bool | None = None
    ) -> list[Tensor]:
        """Row numbers of each mini-batch of one epoch: at most ``rows`` rows and about ``tokens`` response tokens each.

        Where ``rows`` does not divide them, they are as equal as can be, in as many mini-batches: an optimizer step
        on a few rows that are left over would move the weights as far as one on many.
        The order is drawn from the seeds of the rows, so it depends on neither the order of the batch nor its other
        rows. With neither limit all rows are one mini-batch, in the order of their keys. ``together``: rows of one
        prompt are in the same mini-batch, in the order of their keys, at the place that the first of them drew; None
        is what the loss asks for.
        """
        together = self.loss.by_prompt if together is None else together
        everything = range(len(self))
        if rows is None and tokens is None:
            return [torch.arange(len(self))] if len(self) else []
        drawn = Batch(self.keys, {}, self.call).row_seeds("order", epoch).tolist()
        units: dict[Any, list[int]] = {}
        for i in everything:
            units.setdefault(self.keys[i][0] if together else i, []).append(i)
        ordered, counts = sorted(units.values(), key=lambda u: drawn[u[0]]), self.lengths.tolist()
        parts = _cut(ordered, counts, rows, tokens)
        if rows is None or tokens is not None or len(parts) < 2:
            return parts
        least = -(-len(self) // len(parts))
        evener = (_cut(ordered, counts, limit, None) for limit in range(least, rows))
        return next((found for found in evener if len(found) == len(parts)), parts)

    def measures(self) -> dict[str, float]:
        """What an update reports of all its rows, by name."""
        found = {name: getattr(self, name) for name in ("truncated", "silent_groups", "repetition")}
        return {name: value for name, value in found.items() if value is not None}

    def share(self, number: int, of: int) -> Tensor:
        """Part ``number`` of the rows, split into ``of`` parts in the order of their keys."""
        return torch.arange(number * len(self) // of, (number + 1) * len(self) // of)

    def weights(self, chosen: Tensor) -> Tensor:
        """The weight of each row in the loss of the rows ``chosen``, f64[rows]: its own, or that of each trained token.

        It is 0 for rows that are not chosen, and for those without a trained token.
        """
        found = torch.zeros(len(self), dtype=torch.float64)
        counts = self.counts[chosen]
        if self.loss.per == "row":
            found[chosen] = row_weights(counts > 0, self.loss.aggregate)
            return found
        row = torch.repeat_interleave(torch.arange(len(chosen)), counts)
        numbers: dict[Any, int] = {}
        of_row = [numbers.setdefault(self.keys[i][0], len(numbers)) for i in chosen.tolist()]
        group = torch.tensor(of_row, dtype=torch.int64)
        mask, loss = torch.ones_like(row).bool(), self.loss
        every = token_weights(mask, row, len(chosen), loss.aggregate, loss.norm, group)
        first = (counts.cumsum(0) - counts)[counts > 0]  # all tokens of a row weigh the same
        found[chosen[counts > 0]] = every[first]
        return found

    def trained(self, chosen: Tensor) -> Tensor:
        """Those of the rows ``chosen`` that have to be computed."""
        return chosen[~self.silent[chosen]]

    def local(self, chosen: Tensor) -> Tensor:
        """Which rows of this rank's batch the rows ``chosen`` are, those of other ranks left out."""
        here = torch.full((len(self),), -1)
        here[self.mine] = torch.arange(len(self.mine))
        found = here[chosen]
        return found[found >= 0]

    def _check(self) -> None:
        for i in range(1, len(self)):
            if self.keys[i] == self.keys[i - 1]:
                raise RowsError(f"The key {self.keys[i]} is given to two rows.", fix="Split the rows, not copy them.")
            if self.loss.groups and self.keys[i][0] == self.keys[i - 1][0] and self.place[i] != self.place[i - 1]:
                raise ProgramError(
                    f"{self.loss.name} compares rows of one prompt, and those of prompt {self.keys[i][0]} are on "
                    f"ranks {int(self.place[i - 1])} and {int(self.place[i])}.",
                    fix="Give all rows of a prompt to one rank.",
                )


def _share(counts: Sequence[int | None], rows: int) -> float | None:
    """Of all rows the share that ranks have counted; None where none has."""
    known = [count for count in counts if count is not None]
    return sum(known) / rows if known and rows else None


def _of_policy(keys: Sequence[Key], said: Sequence[Any]) -> tuple[float | None, float | None]:
    """Of what ranks have measured the share of prompts without a signal, and that of repeated sequences of tokens."""
    if any(part is None for part in said):
        return None, None
    again, grams = (sum(part[1][i] for part in said) for i in (0, 1))
    repetition = again / grams if grams else 0.0
    if any(part[0] is None for part in said):
        return None, repetition
    return silent_groups(keys, [still for part in said for still in part[0]]), repetition


def _measured(batch: Batch, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its response tokens, the trained ones, and whether it adds nothing to the gradient."""
    mask = batch.response_mask
    lengths, inside = mask.lengths, mask.values.cpu()
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    counts = torch.bincount(row[inside], minlength=len(lengths))
    silent = counts == 0
    if loss.zero_advantage_is_zero and "advantages" in batch.fields:
        speaks = inside & (batch.advantages.values.cpu() != 0)
        silent = torch.bincount(row[speaks], minlength=len(lengths)) == 0
    return lengths, counts, silent


def _cut(units: Sequence[list[int]], counts: list[int], rows: int | None, tokens: int | None) -> list[Tensor]:
    """Units one after the other in as few parts as the limits allow; one that is beyond them has its own."""
    made: list[list[int]] = []
    held = 0
    for unit in units:
        count = sum(counts[i] for i in unit)
        full = made and (
            (rows is not None and len(made[-1]) + len(unit) > rows) or (tokens is not None and held + count > tokens)
        )
        if full or not made:
            made.append([])
            held = 0
        made[-1] += unit
        held += count
    return [torch.tensor(part, dtype=torch.int64) for part in made]
