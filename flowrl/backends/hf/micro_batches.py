"""Micro-batches from packed rows, in the cheaper of two layouts; both give the same numbers and the same gradient.

``rows``: each row is a sequence, padded at its end; attention is causal, so no mask is needed.
``shared``: the rows of a group lie in one sequence as a tree: what several of them begin with is there once, be it the
prompt, the turns that branches of an episode have in common, or words that were sampled alike; a mask keeps branches
apart. What is left of a sequence is filled with the rows of other groups.
The last token of a response predicts nothing and is not fed. Both layouts round differently: in float64 too where
transformers computes a model's norms in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...batch import Batch
from ...errors import DataError
from ...rl.take_rows import take_rows
from .generation.support import Support
from .ragged import ragged_index, starts_of

if TYPE_CHECKING:
    from .net import Net

#: Entries of the masks of one micro-batch.
MASK_ENTRIES = 1 << 26


@dataclass(frozen=True)
class Rows:
    """Prompts with responses, packed, on the CPU: ``ids`` i64[total]; the others i64[rows].

    ``starts``: where a row begins; ``prompts`` and ``responses``: how many tokens each has. Rows with the same
    ``group`` are of one prompt, and may begin alike. ``temperature`` f32[rows]: what logits are divided by; None is 1
    for all.
    ``support``: of each response token, which part of the vocabulary its distribution is of; None is all of it.
    """

    ids: Tensor
    starts: Tensor
    prompts: Tensor
    responses: Tensor
    group: Tensor
    temperature: Tensor | None = None
    support: Support | None = None

    @staticmethod
    def of(batch: Batch) -> Rows:
        """From ``tokens`` and ``response_mask``, and ``temperature`` and the support where they are there.

        DataError where a row has no token before its response, a temperature that is not above 0, or a token that its
        support lacks.
        """
        tokens, responses = batch.tokens, batch.response_mask.lengths
        prompts = tokens.lengths - responses
        if len(prompts) and int(prompts.min()) < 1:
            row = int(prompts.argmin())
            raise DataError(
                f"Row {batch.keys[row]} has {int(tokens.lengths[row])} tokens and a response of {int(responses[row])}: "
                "no token stands before it.",
                fix="Give every row a prompt of at least one token.",
            )
        ids, starts = tokens.values.cpu().long(), tokens.offsets[:-1]
        rows = Rows(ids, starts, prompts, responses, batch.group_index()[0], _temperature(batch))
        return replace(rows, support=Support.of(batch, rows.targets))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def targets(self) -> Tensor:
        """The ids of all response tokens, packed: i64[response tokens]."""
        return self.ids[ragged_index(self.starts + self.prompts, self.responses)]

    def temperature_at(self, device: torch.device) -> Callable[[Tensor], Tensor | None]:
        """A function of numbers of response tokens that gives their temperatures, on the device; None is 1 for all."""
        if self.temperature is None:
            return lambda at: None
        every = self.temperature.repeat_interleave(self.responses).to(device)
        return lambda at: every[at]

    def support_at(self, device: torch.device) -> Callable[[Tensor], Support | None]:
        """A function of numbers of response tokens that gives their support, on the device; None is all tokens."""
        if self.support is None:
            return lambda at: None
        return self.support.to(device).at


def _temperature(batch: Batch) -> Tensor | None:
    """The temperatures of rows, where one is not 1."""
    if "temperature" not in batch:
        return None
    column = batch["temperature"]
    if column.type != "f32[]":
        raise DataError(
            f"'temperature' is {column.type} here, and the model reads one f32 per row.",
            fix="Give a column of the data another name.",
        )
    values = column.values.cpu()
    if len(values) and not bool(((values > 0) & values.isfinite()).all()):
        row = int((~((values > 0) & values.isfinite())).nonzero()[0])
        raise DataError(
            f"Row {batch.keys[row]} has the temperature {float(values[row]):g}.", fix="Give every row one above 0."
        )
    return values if bool((values != 1).any()) else None


@dataclass(frozen=True)
class Micro:
    """One forward pass over ``ids`` [sequences, tokens].

    ``gather`` i64[n] are places in it, flattened, whose hidden states predict the response tokens ``at`` i64[n]
    (numbers in the packed response tokens of all rows).
    """

    ids: Tensor
    positions: Tensor | None
    #: Of each token, where in its sequence the branches that go on from it end: no token from there on sees it. -1 for
    #: padding. None in the rows layout.
    until: Tensor | None
    gather: Tensor
    at: Tensor

    @staticmethod
    def idle(net: Net) -> Micro:
        """A pass of one token that predicts nothing, for a rank that has nothing to do while others have."""
        none = torch.zeros(0, dtype=torch.int64)
        return Micro(torch.full((1, 1), net.filler), None, None, none, none)

    def to(self, device: torch.device) -> Micro:
        """The same on the device."""
        if device.type == "cpu":
            return self
        there = {n: t if t is None else t.pin_memory().to(device, non_blocking=True) for n, t in vars(self).items()}
        return replace(self, **there)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores, [sequences, 1, tokens, tokens]: 0 for tokens that are seen, else very little."""
        if self.until is None:
            return None
        at = torch.arange(self.until.shape[1], device=self.until.device)
        seen = at[None, :, None] < self.until[:, None, :]
        seen.tril_()
        seen.diagonal(dim1=1, dim2=2).fill_(True)
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def hidden(self, net: Net) -> Tensor:
        """The hidden states [n, hidden] that predict the tokens ``at``."""
        with net.mixed():
            found = net.hidden(self.ids, self.positions, self.mask(net.compute))
        return take_rows(found.flatten(0, 1), self.gather)


def micro_batches(net: Net, rows: Rows, chosen: Tensor, budget: int, layout: str | None = None) -> list[Micro]:
    """The rows ``chosen``, save those without a response, as micro-batches of at most ``budget`` tokens each.

    A row that is longer than the budget makes a micro-batch of its own. ``layout`` None is the cheaper one.
    """
    chosen = chosen[rows.responses[chosen] > 0]
    if not len(chosen):
        return []
    alone = list(_filled(_units_alone(rows, chosen), budget))
    if layout == "rows" or not shareable(net, rows, chosen):
        return [_build(rows, lines, net.filler, shared=False) for lines in alone]
    together = _together(net, rows, chosen, budget)
    if layout is None and _cost(net, together, masked=True) >= _cost(net, alone, masked=False):
        return [_build(rows, lines, net.filler, shared=False) for lines in alone]
    return [_build(rows, lines, net.filler, shared=True) for lines in together]


def shareable(net: Net, rows: Rows, chosen: Tensor) -> bool:
    """Whether the shared layout is right for these rows: they attend in full, and the mask is not too large."""
    longest = int((rows.prompts + rows.responses)[chosen].max())
    return net.grouped and (net.reach is None or longest < net.reach) and longest * longest <= MASK_ENTRIES


# -- which rows together --------------------------------------------------------------------------------------------


@dataclass
class Unit:
    """Rows that begin alike, each behind the one that it shares most with.

    Of each row: how many tokens it feeds, and how many of them, the first ones, are those of the row before it.
    """

    rows: list[int]
    fed: list[int]
    shared: list[int]
    width: int = 0

    def add(self, row: int, fed: int, shared: int) -> None:
        """One row more."""
        self.rows.append(row)
        self.fed.append(fed)
        self.shared.append(shared)
        self.width += fed - shared


@dataclass
class Line:
    """One sequence: units one after the other."""

    units: list[Unit]
    width: int


def _trees(net: Net, begins: list[Begin], most: int, *, all_alike: bool) -> list[Unit]:
    """Units of at most ``most`` tokens, wide ones first: of all rows of a group that begin alike; or, without
    ``all_alike``, of those whose beginning saves more than it costs that each token of a unit is held against all.
    """
    units: list[Unit] = []
    linear, pair = net.flops
    for begin in begins:
        unit, own = (units[-1] if units else None), begin.fed - begin.shared
        joins = unit is not None and begin.shared > 0 and unit.width + own <= most
        if joins and unit is not None and not all_alike:
            joins = linear * begin.shared + pair * (begin.fed**2 - own**2 - 2 * unit.width * own) > 0
        if unit is None or not joins:
            units.append(unit := Unit([], [], []))
            unit.add(begin.row, begin.fed, 0)
        else:
            unit.add(begin.row, begin.fed, begin.shared)
    return sorted(units, key=lambda u: -u.width)


@dataclass(frozen=True)
class Begin:
    """A row, how many tokens it feeds, and how many of them are those of the row before it; 0 for another group's."""

    row: int
    fed: int
    shared: int


def _beginnings(rows: Rows, chosen: Tensor) -> list[Begin]:
    """The rows by group, in an order in which rows that begin alike are next to each other."""
    columns = (rows.group[chosen], rows.starts[chosen], (rows.prompts + rows.responses)[chosen] - 1, chosen)
    every = rows.ids.numpy()
    groups: dict[int, list[tuple[bytes, int, int, int]]] = {}
    for group, start, fed, row in zip(*(c.tolist() for c in columns), strict=True):
        # Any order of equal tokens puts equal beginnings together: that of their bytes is at hand.
        groups.setdefault(group, []).append((every[start : start + fed].tobytes(), row, start, fed))
    found: list[Begin] = []
    for members in groups.values():
        before = every[:0]
        for _, row, start, fed in sorted(members):
            own = every[start : start + fed]
            found.append(Begin(row, fed, _alike(before, own)))
            before = own
    return found


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two rows begin with alike."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _together(net: Net, rows: Rows, chosen: Tensor, budget: int) -> list[list[Line]]:
    """Micro-batches of groups; several share a sequence where that saves padding."""
    most = min(budget, int(MASK_ENTRIES**0.5))
    begins, options = _beginnings(rows, chosen), []
    for all_alike in (True, False):
        units = _trees(net, begins, most, all_alike=all_alike)
        longest = units[0].width
        widths = {max(longest, min(most, int(longest * factor))) for factor in (1, 1.25, 1.5, 2, 3, 4)}
        options += [list(_filled(_packed(units, width), budget, MASK_ENTRIES)) for width in sorted(widths)]
    return min(options, key=lambda option: _cost(net, option, masked=True))


def _packed(units: list[Unit], width: int) -> list[Line]:
    """First fit: each unit goes to the first of the latest sequences that has room for it."""
    lines: list[Line] = []
    for unit in units:
        for line in lines[-64:]:
            if line.width + unit.width <= width:
                line.units.append(unit)
                line.width += unit.width
                break
        else:
            lines.append(Line([unit], unit.width))
    return sorted(lines, key=lambda line: -line.width)


def _filled(lines: list[Line], budget: int, entries: int | None = None) -> Iterator[list[Line]]:
    """Sequences by falling width into micro-batches: tokens stay within the budget, a mask within ``entries``."""
    taken: list[Line] = []
    for line in lines:
        if taken:
            tokens = (len(taken) + 1) * taken[0].width
            if tokens > budget or (entries is not None and tokens * taken[0].width > entries):
                yield taken
                taken = []
        taken.append(line)
    if taken:
        yield taken


def _cost(net: Net, micros: list[list[Line]], *, masked: bool) -> float:
    """Floating-point operations of the forward pass, padding included. Without a mask half the pairs are done."""
    linear, pair = net.flops
    pairs = pair if masked else pair / 2
    return sum(len(m) * m[0].width * (linear + m[0].width * pairs) for m in micros)


# -- building them --------------------------------------------------------------------------------------------------


def _build(rows: Rows, lines: list[Line], filler: int, *, shared: bool) -> Micro:
    """The tensors of one micro-batch."""
    row = torch.tensor([row for line in lines for unit in line.units for row in unit.rows])
    at = ragged_index(starts_of(rows.responses)[row], rows.responses[row])
    ids = torch.full((len(lines), lines[0].width), filler)
    if shared:
        return _as_trees(rows, lines, ids, at)
    begins, prompts, responses = torch.arange(len(lines)) * lines[0].width, rows.prompts[row], rows.responses[row]
    fed = prompts + responses - 1
    ids.view(-1)[ragged_index(begins, fed)] = rows.ids[ragged_index(rows.starts[row], fed)]
    return Micro(ids, None, None, ragged_index(begins + prompts - 1, responses), at)


def _as_trees(rows: Rows, lines: list[Line], ids: Tensor, at: Tensor) -> Micro:
    """Each unit as a tree: behind what a row shares with the one before it come the tokens that it has alone."""
    width = ids.shape[1]
    positions, until = torch.zeros_like(ids), torch.full_like(ids, -1)
    tokens, place, end = ids.view(-1).numpy(), positions.view(-1).numpy(), until.view(-1).numpy()
    every, starts, prompts = rows.ids.numpy(), rows.starts.tolist(), rows.prompts.tolist()
    predicted: list[np.ndarray] = []
    for number, line in enumerate(lines):
        first = free = number * width
        for unit in line.units:
            path = np.arange(0)  # where the tokens of the latest row lie
            for row, fed, shared in zip(unit.rows, unit.fed, unit.shared, strict=True):
                end[path[shared:]] = free - first  # nothing goes on from there
                own = slice(free, free + fed - shared)
                tokens[own] = every[starts[row] + shared : starts[row] + fed]
                place[own] = np.arange(shared, fed)
                path = np.concatenate([path[:shared], np.arange(own.start, own.stop)])
                predicted.append(path[prompts[row] - 1 :])
                free = own.stop
            end[path] = free - first
    return Micro(ids, positions, until, torch.from_numpy(np.concatenate(predicted)), at)


def try_shared(net: Net) -> tuple[Tensor, Tensor]:
    """The same states in both layouts: two prompts, three rows of the first, two of them alike for a while, and one."""
    lengths, prompts = torch.tensor([7, 5, 6, 4]), torch.tensor([3, 3, 3, 2])
    starts = starts_of(lengths)
    ids = (torch.arange(int(lengths.sum())) * 7 + 2) % net.model.get_input_embeddings().weight.shape[0]
    for row, alike in ((1, 3), (2, 4)):
        ids[starts[row] : starts[row] + alike] = ids[:alike]
    rows = Rows(ids, starts, prompts, lengths - prompts, torch.tensor([0, 0, 0, 1]))
    chosen = torch.arange(4)
    found = []
    trees = _trees(net, _beginnings(rows, chosen), 64, all_alike=True)
    for lines, shared in ((_packed(trees, 64), True), (_units_alone(rows, chosen), False)):
        micro = _build(rows, lines, net.filler, shared=shared).to(net.device)
        hidden = micro.hidden(net)
        found.append(torch.empty_like(hidden).index_copy_(0, micro.at, hidden))
    return found[0], found[1]


def _units_alone(rows: Rows, chosen: Tensor) -> list[Line]:
    """A sequence per row, long ones first."""
    fed = ((rows.prompts + rows.responses)[chosen] - 1).tolist()
    units = [Unit([row], [width], [0], width) for row, width in zip(chosen.tolist(), fed, strict=True)]
    return [Line([unit], unit.width) for unit in sorted(units, key=lambda u: -u.width)]
