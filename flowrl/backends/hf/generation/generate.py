"""Sampling responses: a prompt is computed once for all its rows, and finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....batch import Column
from ....workers.decode_passes import DecodePasses
from ....workers.model_options import Sampled, Sampling
from ...continuous import check_lengths
from ...draw import uniforms
from ..products import prepared, serves
from ..ragged import ragged_index, starts_of
from .decode import Decoder, Plain, Slotted, prefill_tokens
from .sample import draw
from .support import Recorder, columns

if TYPE_CHECKING:
    from ..net import Net

#: Rows leave the batch once fewer than this share of it is alive.
COMPACT_BELOW = 0.8
#: Tokens between two looks at who is alive; a device that computes ahead of the CPU must not wait for each.
LOOK_EVERY = {"cpu": 1, "cuda": 16}
#: Uniforms made at a time.
AHEAD = 32


def generate(
    net: Net,
    prompts: Column,
    n: int,
    seeds: Tensor,
    sampling: Sampling,
    stops: tuple[int, ...],
    starts: Tensor | None = None,
    *,
    cache_bytes: int | None = None,
    note_prefix: Callable[[int, int], None] | None = None,
    note_passes: Callable[[DecodePasses], None] | None = None,
) -> Sampled:
    """``n`` responses to each prompt, rows parent-major.

    Args:
        net: the model.
        prompts: i32[*prompt], none empty.
        n: responses for each.
        seeds: i64[prompts * n]; token number ``t`` of a row takes the uniform of ``(seed, start + t)``.
        sampling: how tokens are drawn, and how many at most; a response also ends where the model's positions end.
        stops: ids that end a response and are its last token.
        starts: i64[prompts * n], the first token's number; None is 0.
        cache_bytes: most memory for keys and values; None is a quarter of the device's, or 2 GiB on a CPU.
        note_prefix: is told how many tokens rows have brought with them, and how many of these were not computed.
        note_passes: is told how long it took to give rows their next tokens.

    Raises DataError for an empty prompt, or one that fills all positions of the model.
    """
    run = _Run(net, prompts, n, seeds, sampling, stops, starts, note_passes)
    with torch.no_grad(), net.mixed():
        parts = [run.bucket(rows) for rows in run.buckets(cache_bytes or default_cache_bytes(net))]
    if note_prefix is not None:
        note_prefix(int(run.lengths.sum()) * n, run.found)
    return run.collect(parts)


def default_cache_bytes(net: Net) -> int:
    """A figure that does not depend on what is free just now, so that the same call has the same shapes."""
    if net.device.type != "cuda":
        return 2 << 30
    return torch.cuda.get_device_properties(net.device).total_memory // 4


#: Rows, their lengths, whether a stop ended them; packed: ids, two log-probabilities; where recorded, the support.
Part = tuple[Tensor, ...]


class _Meter:
    """Tells of passes between two looks at who is alive: ``_Meter(prompt, tell)``, with the mean length of a prompt."""

    def __init__(self, prompt: float, tell: Callable[[DecodePasses], None] | None) -> None:
        self._prompt, self._tell = prompt, tell
        self._last: tuple[float, int, int] | None = None  # when, after which token, how many were alive

    def look(self, token: int, alive: int) -> None:
        """Note that so many rows go on after a token, the first one being 0."""
        now = perf_counter()
        if self._tell is not None and self._last is not None:
            then, before, rows = self._last
            context = rows * sum(self._prompt + made + 1 for made in range(before, token))
            self._tell(DecodePasses(token - before, (token - before) * rows, int(context), now - then))
        self._last = now, token, alive


class _Run:
    """One call of :func:`generate`: its inputs on the device, and how rows are put together."""

    def __init__(
        self,
        net: Net,
        prompts: Column,
        n: int,
        seeds: Tensor,
        sampling: Sampling,
        stops: tuple[int, ...],
        starts: Tensor | None,
        note_passes: Callable[[DecodePasses], None] | None,
    ) -> None:
        device = net.device
        self.net, self.n, self.sampling = net, n, sampling
        self.lengths, self.offsets = prompts.lengths, prompts.offsets[:-1]
        self.most = check_lengths(net.positions, self.lengths)
        self.ids = prompts.values.to(device=device, dtype=torch.int64)
        self.seeds = seeds.to(device)
        self.starts = None if starts is None else starts.to(device)
        self.stops = torch.tensor(sorted(set(stops)), dtype=torch.int64, device=device)
        self.head = net.head.cast()
        #: Whether the distribution that is sampled from is the policy's own, at the temperature.
        self.own = sampling.is_policy
        self.found = 0  # tokens of prompts that were computed for another row
        self.note_passes = note_passes

    def buckets(self, cache_bytes: int) -> Iterator[Tensor]:
        """Rows by falling prompt length, as many at a time as the memory for keys and values allows."""
        order = torch.argsort(self.lengths, descending=True, stable=True)
        lengths = self.lengths[order].tolist()
        rows = (order[:, None] * self.n + torch.arange(self.n)).flatten()
        per_token = self.net.cache_bytes_per_token()
        start = 0
        while start < len(rows):
            prompt = start // self.n
            longest = lengths[prompt]
            room = max(1, cache_bytes // (per_token * (longest + self.sampling.max_tokens)))
            if not self.slotted(longest):  # one length at a time, so that nothing is padded
                same = prompt + sum(length == longest for length in lengths[prompt:])
                room = min(room, max(1, prefill_tokens(self.net.device) // longest), same * self.n - start)
            yield rows[start : start + room]
            start += room

    def slotted(self, longest: int) -> bool:
        """Whether the engine's own cache serves a bucket with prompts up to this length."""
        reach = self.net.reach
        return self.net.own_cache and (reach is None or longest + self.sampling.max_tokens < reach)

    def decoder(self, rows: Tensor, limit: int) -> Decoder:
        """What computes these rows."""
        prompts, source = torch.unique_consecutive(rows // self.n, return_inverse=True)
        lengths, offsets = self.lengths[prompts], self.offsets[prompts]
        if self.slotted(int(lengths.max())):
            self.found += int((self.lengths[rows // self.n]).sum() - lengths.sum())
            return Slotted(self.net, self.ids, offsets, lengths, source, limit)
        index = ragged_index(offsets[source], lengths[source]).to(self.net.device)
        return Plain(self.net, self.ids[index].view(len(rows), -1))

    def bucket(self, rows: Tensor) -> Part:
        """Sample the responses of these rows to their end."""
        device = self.net.device
        limits = torch.full_like(rows, self.sampling.max_tokens)
        if self.most is not None:
            limits = limits.minimum(self.most - self.lengths[rows // self.n])
        limit = int(limits.max())
        even = int(limits.min()) == limit
        decoder = self.decoder(rows, limit)
        rows, limits = rows.to(device), limits.to(device)
        ids = torch.zeros(len(rows), limit, dtype=torch.int64, device=device)
        plain = torch.zeros(len(rows), limit, dtype=self.head.wide, device=device)
        sampled = plain if self.own else torch.zeros_like(plain)

        at: Tensor | slice = slice(None)  # where the rows of the batch lie in these
        alive = torch.arange(len(rows), device=device)
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        look = LOOK_EVERY.get(device.type, 1)
        uniform: Tensor | None = None
        seen = self.seen(rows)
        support = Recorder(len(rows), limit, device) if self.sampling.support else None
        hidden = decoder.first()
        meter = _Meter(float(self.lengths[rows.cpu() // self.n].float().mean()), self.note_passes)
        for t in range(limit):
            if not self.sampling.greedy:
                if t % AHEAD == 0:
                    uniform = self.uniforms(rows[at], t)
                column = uniform[:, t % AHEAD]  # type: ignore[index]
            else:
                column = None
            kept: list[Tensor] | None = None if support is None else []
            with self.net.exact():
                token, plain_t, sampled_t = draw(hidden, self.head, column, self.sampling, seen, kept)
            if support is not None and kept:
                support.keep(at, t, torch.cat(kept))
            ids[at, t], plain[at, t] = token, plain_t
            if not self.own:
                sampled[at, t] = sampled_t
            if t + 1 == limit:
                break
            if seen is not None:
                seen[torch.arange(len(token), device=device), token] = True
            done = done | torch.isin(token, self.stops)
            if not even:
                done = done | (limits[at] <= t + 1)
            if (t + 1) % look == 0:
                live = (~done).nonzero().squeeze(-1)
                meter.look(t, len(live))
                if not len(live):
                    break
                if decoder.compacts and len(live) < COMPACT_BELOW * len(done):
                    stay = _staying(done, prepared(len(live)) if serves(hidden) else len(live))
                    decoder.keep(stay)
                    at = alive = alive[stay]
                    done, token = done[stay], token[stay]
                    uniform = None if uniform is None else uniform[stay]
                    seen = None if seen is None else seen[stay]
            hidden = decoder.next(token, t)
        ended, *found = _cut(ids, plain, sampled, limits, self.stops)
        return rows, ended, *found, *(() if support is None else support.packed(ended))

    def seen(self, rows: Tensor) -> Tensor | None:
        """Which tokens are in the prompts of these rows, bool[rows, vocab]; None where nothing is penalised."""
        if self.sampling.repetition_penalty == 1.0:
            return None
        vocab, device = self.head.weight.shape[0], self.net.device
        prompts = (rows // self.n).cpu()
        lengths = self.lengths[prompts]
        ids = self.ids[ragged_index(self.offsets[prompts], lengths).to(device)]
        row = torch.arange(len(rows)).repeat_interleave(lengths).to(device)
        known = ids < vocab  # a model may embed more tokens than it predicts
        seen = torch.zeros(len(rows), vocab, dtype=torch.bool, device=device)
        seen[row[known], ids[known]] = True
        return seen

    def uniforms(self, rows: Tensor, t: int) -> Tensor:
        """The uniforms [rows, AHEAD] of tokens ``t`` and on."""
        ahead = torch.arange(t, t + AHEAD, device=rows.device)
        first = 0 if self.starts is None else self.starts[rows][:, None]
        return uniforms(self.seeds[rows][:, None], first + ahead)

    def collect(self, parts: list[Part]) -> Sampled:
        """The results of all buckets in the order of the call's rows, on the CPU."""
        if not parts:
            none = Column.packed(torch.zeros(0), [0] * (len(self.lengths) * self.n), "response")
            finished = torch.zeros(len(none), dtype=torch.bool)
            nothing = none.with_values(torch.zeros(0, dtype=torch.int32))
            kept = (Column.packed(nothing.values, none.lengths, "support"), nothing) if self.sampling.support else None
            return Sampled(nothing, none, none, finished, self.sampling.row_temperature, kept)
        rows, ended, stopped, ids, plain, sampled, *support = (torch.cat(p).cpu() for p in zip(*parts, strict=True))
        order = torch.argsort(rows)
        lengths = ended[order]
        source = ragged_index(starts_of(ended)[order], lengths)
        made = Column.packed(ids[source].int(), lengths, "response")
        logprobs = made.with_values(plain[source].float())
        same = logprobs if self.own else made.with_values(sampled[source].float())
        kept = columns(support[0], support[1], source, made) if support else None
        return Sampled(made, logprobs, same, stopped[order], self.sampling.row_temperature, kept)


def _staying(done: Tensor, count: int) -> Tensor:
    """The rows that stay in a batch of so many: those that are not done, and some that are; in increasing order.

    >>> _staying(torch.tensor([True, False, True, False]), 3)
    tensor([0, 1, 3])
    """
    return torch.argsort(done, stable=True)[:count].sort().values


def _cut(
    ids: Tensor, plain: Tensor, sampled: Tensor, limits: Tensor, stops: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Lengths, whether a stop ended the row, and the three packed: each row up to its first stop, or its limit."""
    at = torch.arange(ids.shape[1], device=ids.device)
    stop = torch.isin(ids, stops) & (at < limits[:, None])
    stopped = stop.any(1)
    ended = torch.where(stopped, stop.int().argmax(1) + 1, limits)
    inside = at < ended[:, None]
    return ended, stopped, ids[inside], plain[inside], sampled[inside]
