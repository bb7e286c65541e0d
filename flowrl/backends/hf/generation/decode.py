"""Hidden states of the next token: with the engine's own cache, or plainly, for models that need their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ragged import padded
from .cache import Slots

if TYPE_CHECKING:
    from ..net import Net


def prefill_tokens(device: torch.device) -> int:
    """Tokens of prompts in one forward pass."""
    return 65536 if device.type == "cuda" else 8192


class Slotted:
    """Each prompt is computed once, padded at its end, and its keys and values copied to its rows.

    ``ids`` are packed prompts, on the device. On the CPU: ``starts`` and ``lengths`` i64[prompts] of each; ``source``
    i64[rows], increasing, the prompt of each row; ``room``, tokens of a response at most.
    """

    compacts = True

    def __init__(self, net: Net, ids: Tensor, starts: Tensor, lengths: Tensor, source: Tensor, room: int) -> None:
        device = net.device
        self.net, self.ids, self.starts, self.lengths = net, ids, starts, lengths
        self.counts = torch.bincount(source, minlength=len(lengths)).tolist()  # rows of each prompt
        self.source = source.to(device)
        self.last = net.positions - 1 if net.positions is not None else None
        self.longest = int(lengths.max())
        self.slots = Slots(net.config.num_hidden_layers, len(source), self.longest + room, net.compute)
        self.bias: Tensor | None = None
        self.positions = lengths[source].to(device)[:, None]
        if int(lengths.min()) < self.longest:  # slots between a prompt's end and the first response token are empty
            slot = torch.arange(self.longest + room, device=device)
            empty = (slot >= self.positions) & (slot < self.longest)
            bias = torch.zeros(empty.shape, dtype=net.compute, device=device)
            self.bias = bias.masked_fill_(empty, torch.finfo(net.compute).min)[:, None, None]

    def first(self) -> Tensor:
        """Hidden states [rows, hidden] after the prompts."""
        net, found, row = self.net, [], 0
        step = max(1, prefill_tokens(net.device) // self.longest)
        for a in range(0, len(self.lengths), step):
            lengths = self.lengths[a : a + step]
            width = int(lengths.max())
            there = lengths.to(net.device)
            ids = padded(self.ids, self.starts[a : a + step].to(net.device), there, width, net.filler)
            rows = slice(row, row + sum(self.counts[a : a + step]))
            self.slots.begin(rows, self.source[rows] - a, width)
            positions = torch.arange(width, device=net.device).expand(len(ids), -1)
            hidden = net.hidden(ids, positions, cache=self.slots)
            found.append(hidden[torch.arange(len(ids), device=net.device), there - 1])
            row = rows.stop
        return torch.cat(found)[self.source]

    def next(self, token: Tensor, t: int) -> Tensor:
        """Hidden states [rows, hidden] after ``token`` i64[rows], the response's token number ``t``."""
        slot = self.longest + t
        self.slots.advance(slot)
        mask = None if self.bias is None else self.bias[..., : slot + 1]
        positions = self.positions + t
        if self.last is not None:
            positions.clamp_(max=self.last)  # rows that are done go on until they leave
        return self.net.hidden(token[:, None], positions, mask, self.slots)[:, -1]

    def keep(self, live: Tensor) -> None:
        """Only these rows stay."""
        self.slots.keep(live)
        self.positions = self.positions[live]
        if self.bias is not None:
            self.bias = self.bias[live]


class Plain:
    """Prompts of one length, a row of its own for each response, in the cache that transformers makes for the model.

    Where the model takes none, all tokens are computed again for each new one.
    """

    compacts = False

    def __init__(self, net: Net, ids: Tensor) -> None:
        from transformers.cache_utils import DynamicCache

        self.net, self.ids = net, ids
        self.cache: Any = DynamicCache(config=net.config) if net.cached else None

    def first(self) -> Tensor:
        """As :meth:`Slotted.first`."""
        return self.net.hidden(self.ids, cache=self.cache)[:, -1]

    def next(self, token: Tensor, t: int) -> Tensor:
        """As :meth:`Slotted.next`."""
        self.ids = torch.cat([self.ids, token[:, None]], 1)
        if self.cache is None:
            return self.net.hidden(self.ids)[:, -1]
        return self.net.hidden(token[:, None], cache=self.cache)[:, -1]

    def keep(self, live: Tensor) -> None:
        """Not done here: a model's own cache need not know how."""
        raise AssertionError("a plain decoder keeps its rows")


Decoder = Slotted | Plain


def try_slotted(net: Net) -> tuple[Tensor, Tensor]:
    """The same states from the engine's cache and from whole sequences: two prompts, three rows, one dropped."""
    ids = _some_ids(net, 8)
    decoder = Slotted(net, ids, torch.tensor([0, 3]), torch.tensor([3, 5]), torch.tensor([0, 1, 1]), 3)
    more = _some_ids(net, 6).view(2, 3)
    found = [decoder.first()[[0, 2]], decoder.next(more[0], 0)[[0, 2]]]
    live = torch.tensor([0, 2], device=net.device)
    decoder.keep(live)
    found.append(decoder.next(more[1, live], 1))
    wanted = []
    for row, prompt in ((0, ids[:3]), (2, ids[3:])):
        whole = net.hidden(torch.cat([prompt, more[:, row]])[None])[0]
        wanted.append(whole[-3:])
    return torch.stack(found), torch.stack(wanted, 1)


def try_plain(net: Net) -> tuple[Tensor, Tensor]:
    """The same states from the model's own cache and from whole sequences."""
    ids = _some_ids(net, 12).view(2, 6)
    decoder = Plain(net, ids[:, :4])
    found = [decoder.first(), decoder.next(ids[:, 4], 0), decoder.next(ids[:, 5], 1)]
    return torch.stack(found, 1), net.hidden(ids)[:, 3:]


def _some_ids(net: Net, count: int) -> Tensor:
    vocab = net.model.get_input_embeddings().weight.shape[0]
    return (torch.arange(count, device=net.device) * 5 + 1) % vocab
