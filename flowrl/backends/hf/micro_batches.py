"""Micro-batches from packed rows, in the cheaper of two layouts; both give the same numbers and the same gradient.

``rows``: each row is a sequence, padded at its end; attention is causal, so no mask is needed.
``shared``: rows of one prompt lie in one sequence behind a single copy of it, and a mask keeps them apart; what is
left of a sequence is filled with the rows of other prompts.
The last token of a response predicts nothing and is not fed. Both layouts round differently: in float64 too where
transformers computes a model's norms in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...batch import Batch
from ...errors import DataError
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
    ``group`` have the same prompt. ``temperature`` f32[rows]: what logits are divided by; None is 1 for all.
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
        group = _same_prompt(batch.group_index()[0], ids, starts, prompts)
        rows = Rows(ids, starts, prompts, responses, group, _temperature(batch))
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


def _same_prompt(group: Tensor, ids: Tensor, starts: Tensor, prompts: Tensor) -> Tensor:
    """The groups, with every row whose prompt is not its group's first row's in a group of its own."""
    rows = torch.arange(len(group))
    count = int(group.max()) + 1 if len(group) else 0
    leader = torch.full((count,), len(group)).scatter_reduce_(0, group, rows, "amin")[group]
    same = prompts == prompts[leader]
    compared = torch.where(same, prompts, 0)
    differs = ids[ragged_index(starts, compared)] != ids[ragged_index(starts[leader], compared)]
    row = torch.repeat_interleave(rows, compared)
    same &= torch.bincount(row[differs], minlength=len(group)) == 0
    return torch.where(same, group, count + rows)


@dataclass(frozen=True)
class Micro:
    """One forward pass over ``ids`` [sequences, tokens].

    ``gather`` i64[n] are places in it, flattened, whose hidden states predict the response tokens ``at`` i64[n]
    (numbers in the packed response tokens of all rows).
    """

    ids: Tensor
    positions: Tensor | None
    owner: Tensor | None  # of each token: the group it belongs to, -1 for padding; None in the rows layout
    segment: Tensor | None  # 0 for a prompt, else the number of the row in its group
    gather: Tensor
    at: Tensor

    @staticmethod
    def idle(net: Net) -> Micro:
        """A pass of one token that predicts nothing, for a rank that has nothing to do while others have."""
        none = torch.zeros(0, dtype=torch.int64)
        return Micro(torch.full((1, 1), net.filler), None, None, None, none, none)

    def to(self, device: torch.device) -> Micro:
        """The same on the device."""
        if device.type == "cpu":
            return self
        there = {n: t if t is None else t.pin_memory().to(device, non_blocking=True) for n, t in vars(self).items()}
        return replace(self, **there)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores, [sequences, 1, tokens, tokens]: 0 for tokens that are seen, else very little."""
        if self.owner is None or self.segment is None:
            return None
        owner, segment = self.owner, self.segment
        seen = owner[:, :, None] == owner[:, None, :]
        seen &= (segment[:, None, :] == 0) | (segment[:, :, None] == segment[:, None, :])
        seen.tril_()
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def hidden(self, net: Net) -> Tensor:
        """The hidden states [n, hidden] that predict the tokens ``at``."""
        with net.mixed():
            found = net.hidden(self.ids, self.positions, self.mask(net.compute))
        return found.flatten(0, 1)[self.gather]


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
    """Rows of one prompt behind one copy of it: ``fed`` are the response tokens that each feeds."""

    prompt: int
    rows: list[int]
    fed: list[int]
    width: int

    def add(self, row: int, fed: int) -> None:
        """One row more."""
        self.rows.append(row)
        self.fed.append(fed)
        self.width += fed


@dataclass
class Line:
    """One sequence: units one after the other."""

    units: list[Unit]
    width: int


def _units(rows: Rows, chosen: Tensor, most: int | None) -> list[Unit]:
    """A unit per group, more where one grows beyond ``most`` tokens; per row where that is None. Wide ones first."""
    units: list[Unit] = []
    latest: dict[int, Unit] = {}
    columns = (rows.group[chosen], rows.prompts[chosen], rows.responses[chosen] - 1, chosen)
    for group, prompt, fed, row in zip(*(c.tolist() for c in columns), strict=True):
        unit = latest.get(group)
        if most is None or unit is None or unit.width + fed > most:
            unit = latest[group] = Unit(prompt, [], [], prompt)
            units.append(unit)
        unit.add(row, fed)
    return sorted(units, key=lambda u: -u.width)


def _together(net: Net, rows: Rows, chosen: Tensor, budget: int) -> list[list[Line]]:
    """Micro-batches of groups; several share a sequence where that saves padding."""
    most = min(budget, int(MASK_ENTRIES**0.5))
    units = _units(rows, chosen, most)
    longest = units[0].width
    widths = {max(longest, min(most, int(longest * factor))) for factor in (1, 1.25, 1.5, 2, 3, 4)}
    options = [list(_filled(_packed(units, width), budget, MASK_ENTRIES)) for width in sorted(widths)]
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
    wide = lines[0].width
    places: list[
        tuple[int, int, int, int, int]
    ] = []  # row, its unit's number, its rank in it, begin of prompt, of response
    number = 0
    for start, line in zip(range(0, len(lines) * wide, wide), lines, strict=True):
        begin = start
        for unit in line.units:
            after = begin + unit.prompt
            for rank, (row, fed) in enumerate(zip(unit.rows, unit.fed, strict=True)):
                places.append((row, number, rank, begin, after))
                after += fed
            begin, number = after, number + 1
    row, unit_of, rank, begins, afters = torch.tensor(places).unbind(1)
    prompts, responses = rows.prompts[row], rows.responses[row]
    fed = responses - 1

    lead = rank == 0
    to_prompt = ragged_index(begins[lead], prompts[lead])
    to_response = ragged_index(afters, fed)
    to = torch.cat([to_prompt, to_response])
    from_ = torch.cat(
        [ragged_index(rows.starts[row[lead]], prompts[lead]), ragged_index(rows.starts[row] + prompts, fed)]
    )
    ids = torch.full((len(lines) * wide,), filler)
    ids[to] = rows.ids[from_]

    gather = ragged_index(afters - 1, responses)
    gather[starts_of(responses)] = begins + prompts - 1
    at = ragged_index(starts_of(rows.responses)[row], responses)
    if not shared:
        return Micro(ids.view(-1, wide), None, None, None, gather, at)
    positions, segment, owner = torch.zeros_like(ids), torch.zeros_like(ids), torch.full_like(ids, -1)
    repeated = torch.repeat_interleave
    positions[to] = to - torch.cat([repeated(begins[lead], prompts[lead]), repeated(afters - prompts, fed)])
    owner[to] = torch.cat([repeated(unit_of[lead], prompts[lead]), repeated(unit_of, fed)])
    segment[to_response] = repeated(rank + 1, fed)
    shaped = [t.view(-1, wide) for t in (ids, positions, owner, segment)]
    return Micro(shaped[0], shaped[1], shaped[2], shaped[3], gather, at)


def try_shared(net: Net) -> tuple[Tensor, Tensor]:
    """The same states in both layouts: two prompts, three rows of the first and one of the second."""
    lengths, prompts = torch.tensor([7, 5, 6, 4]), torch.tensor([3, 3, 3, 2])
    starts = starts_of(lengths)
    ids = (torch.arange(int(lengths.sum())) * 7 + 2) % net.model.get_input_embeddings().weight.shape[0]
    for row in (1, 2):  # the prompt of the group
        ids[starts[row] : starts[row] + 3] = ids[:3]
    rows = Rows(ids, starts, prompts, lengths - prompts, torch.tensor([0, 0, 0, 1]))
    chosen = torch.arange(4)
    found = []
    for lines, shared in ((_packed(_units(rows, chosen, 64), 64), True), (_units_alone(rows, chosen), False)):
        micro = _build(rows, lines, net.filler, shared=shared).to(net.device)
        hidden = micro.hidden(net)
        found.append(torch.empty_like(hidden).index_copy_(0, micro.at, hidden))
    return found[0], found[1]


def _units_alone(rows: Rows, chosen: Tensor) -> list[Line]:
    """A sequence per row, long ones first."""
    return [Line([unit], unit.width) for unit in _units(rows, chosen, None)]
