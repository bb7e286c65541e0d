"""Rows that join and leave the batch of a transformers model between two tokens: ``submit``, ``step``, ``abort``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ....errors import FlowError, RunError
from ....workers.decode_passes import DecodePasses
from ....workers.model_options import Sampling
from ....workers.streaming import FailedCall, PrefixTokens, SampledRow, SampleRequest, Streams
from ...continuous import ContinuousBatch, Draw, RunningRow
from ...stream import Stream, stream_of
from ..finite import not_finite
from .decode import Plain, prefill_tokens
from .generate import default_cache_bytes
from .ragged_cache import RaggedCache
from .sample import draw

if TYPE_CHECKING:
    from ..logits import Head
    from ..net import Net
    from ..parameters import Parameters


_ANOTHER_PASS = 128  # tokens that take as long to compute as another pass, about


class Streaming(ABC):
    """What an engine with a net offers of :class:`flowrl.workers.streaming.Streams`."""

    net: Net
    parameters: Parameters

    #: What a publish may do while rows run.
    publish_modes = ContinuousBatch.publish_modes
    most_rows: int | None = ContinuousBatch.most_rows

    @property
    @abstractmethod
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""

    @abstractmethod
    def check_generates(self) -> None:
        """Raise ProgramError where this engine does not sample."""

    @cached_property
    def batch(self) -> NetBatch:
        """The batch of all calls."""
        self.check_generates()
        return NetBatch(self.net, self.parameters, self.eos_ids)

    @property
    def stream(self) -> Stream:
        """Its calls, for threads and for asyncio."""
        return stream_of(cast("Streams", self))

    def submit(self, request: SampleRequest) -> int:
        """Begin a call whose rows leave one by one; see :class:`flowrl.workers.streaming.Streams`."""
        return self.batch.submit(request)

    def tokens_since(self, known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
        """Return what rows have got; see :class:`flowrl.workers.streaming.TellsTokens`."""
        return self.batch.tokens_since(known)

    def step(self) -> list[SampledRow | FailedCall]:
        """Go on by a token of each row that has a place; return what has ended."""
        return self.batch.step()

    def running(self) -> list[tuple[int, int]]:
        """``(call, row)`` of the rows that have not left."""
        return self.batch.running()

    def waiting(self, call: int) -> bool:
        """Return whether rows of a call have no token yet."""
        return self.batch.waiting(call)

    def abort(self, call: int, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End rows of a call, or all; return them with the tokens that they have."""
        return self.batch.abort(call, rows)

    def pause(self) -> None:
        """Stop between two tokens, so that weights may be written."""
        self.batch.pause()

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on, under the weights of ``version`` where it is given."""
        self.batch.resume(version, keep_cache=keep_cache)

    def prefix_tokens(self) -> PrefixTokens:
        """Return the tokens that rows have brought, and those that were not computed; of whole calls too."""
        return self.batch.prefix_tokens()

    def take_passes(self) -> tuple[DecodePasses, ...]:
        """Return how long passes took that were made since it was asked last; those of whole calls too."""
        return self.batch.take_passes()


class NetBatch(ContinuousBatch):
    """The rows of a net: ``NetBatch(net, parameters, ends=(2,))``.

    ``cache_bytes``: most memory for keys and values; rows that find none wait. None is that of ``generate``.
    """

    def __init__(
        self, net: Net, parameters: Parameters, ends: Iterable[int], *, cache_bytes: int | None = None
    ) -> None:
        super().__init__(net.positions, ends)
        self.net, self.parameters = net, parameters
        self._room = max(1, (cache_bytes or default_cache_bytes(net)) // net.cache_bytes_per_token())  # in tokens
        self._ragged = Ragged(net)
        self._cohorts: list[Cohort] = []
        self._inside: set[RunningRow] = set()  # rows whose tokens, all but the last, are in a cache
        self._weights: list[Tensor] = []
        self._head: Head | None = None
        self._written: tuple[int, str] | None = None  # of the weights that the caches are of

    def vocab(self) -> int:
        """How many tokens are predicted."""
        return int(self.net.head.weight.shape[0])

    def not_finite(self, what: str) -> FlowError:
        """The error of log-probabilities that are not finite, with the weights that are not."""
        return not_finite(what, self.parameters)

    def forget_cache(self) -> None:
        """Compute keys and values of all rows again, as they join with the tokens that they have."""
        self._ragged = Ragged(self.net)
        self._cohorts = []
        self._inside.clear()
        self._head = None

    def cache_bytes(self) -> int:
        """Return the bytes of keys and values of rows in the engine's own cache."""
        return self._ragged.bytes

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on; with a version the weights may have been written."""
        super().resume(version, keep_cache=keep_cache)
        if version is not None:
            self._written = None

    def let_go(self, rows: list[RunningRow]) -> None:
        """Free the places of rows."""
        left = self._inside.intersection(rows)
        self._inside -= left
        self._ragged.leave([row for row in self._ragged.rows if row in left])
        for cohort in self._cohorts:
            cohort.leave(left)
        self._cohorts = [cohort for cohort in self._cohorts if not cohort.is_over]
        if not self._inside:
            self._head = None  # a copy of the weights, where they are wider than the computation

    def next_tokens(self, rows: list[RunningRow]) -> tuple[list[RunningRow], Draw]:
        """Hidden states of the rows that have a place: those that were in, and those that join."""
        self._check_weights()
        with torch.no_grad(), self.net.mixed():
            states = [self._ragged.next(), *(cohort.next() for cohort in self._cohorts)]
            slotted, plain = self._joining(rows)
            if slotted or plain:
                others = sum(cohort.room for cohort in (*self._cohorts, *plain))
                self._ragged.make_room(slotted, self._room - others)
            states.append(self._ragged.join(slotted))
            self._note_joined(slotted, [row for cohort in plain for row in cohort.rows])
            for cohort in plain:
                states.append(cohort.first())
                self._cohorts.append(cohort)
        self._inside.update(slotted, *(cohort.rows for cohort in plain))
        going = [row for rows, _ in states for row in rows]
        hidden = torch.cat([hidden for _, hidden in states if len(hidden)])

        head = self._head
        assert head is not None, "the weights were looked at"

        def drawn(
            places: Tensor,
            uniform: Tensor | None,
            sampling: Sampling,
            seen: Tensor | None,
            kept: list[Tensor] | None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            at = places.to(hidden.device)
            uniform, seen = (None if given is None else given.to(hidden.device) for given in (uniform, seen))
            with torch.no_grad():
                return draw(hidden[at], head, uniform, sampling, seen, kept)

        return going, drawn

    def _check_weights(self) -> None:
        """Hold the weights to those of the caches. RunError where somebody wrote them while rows were running."""
        if not self._inside or self._written is None or self._head is None:
            self._weights = list(self.net.model.parameters())
            self._written = self._count_writes()
            self._head = self.net.head.cast()
        elif self._written != self._count_writes():
            raise RunError(
                f"The weights were written while {len(self._inside)} rows were being sampled with them.",
                fix="Call pause() before they are written and resume(version) after.",
            )

    def _count_writes(self) -> tuple[int, str]:
        """How often the weights were written: as torch counts, which leaves out fused optimizers, and since when."""
        return sum(weight._version for weight in self._weights), self.parameters.since

    def _joining(self, rows: list[RunningRow]) -> tuple[list[RunningRow], list[Cohort]]:
        """The rows that find room, in their order: those of the engine's own cache, and the others by length."""
        count, width = len(self._ragged.rows), self._ragged.width
        others = sum(cohort.room for cohort in self._cohorts)
        slotted: list[RunningRow] = []
        plain: dict[int, list[RunningRow]] = {}
        for row in rows:
            if row in self._inside:
                continue
            whole, own = len(row.prompt) + row.limit, self._has_own_cache(row)
            wider = max(width, whole) if own else width
            used = (count + own) * wider + others + (0 if own else whole)
            if used > self._room and (count or others):
                break
            if own:
                slotted.append(row)
                count, width = count + 1, wider
            else:
                plain.setdefault(len(row.prompt) + len(row.ids), []).append(row)
                others += whole
        most = prefill_tokens(self.net.device)
        parts = ((length, group, max(1, most // length)) for length, group in plain.items())
        return slotted, [Cohort(self.net, g[a : a + step]) for _, g, step in parts for a in range(0, len(g), step)]

    def _note_joined(self, slotted: list[RunningRow], plain: list[RunningRow]) -> None:
        """Note which tokens were brought: equal ones are computed once for rows of the engine's own cache."""
        asked = sum(len(row.tokens) for row in (*slotted, *plain))
        once = {row.tokens for row in slotted}
        found = sum(len(row.tokens) for row in slotted) - sum(len(tokens) for tokens in once)
        self.note_prefix(asked, found)

    def _has_own_cache(self, row: RunningRow) -> bool:
        """Whether the engine's own cache serves a row to its end."""
        reach = self.net.reach
        return self.net.own_cache and (reach is None or len(row.prompt) + row.limit < reach)


States = tuple[list[RunningRow], Tensor]


class Ragged:
    """Rows in one cache, of any lengths: ``Ragged(net)``."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.rows: list[RunningRow] = []  # by their place in the cache
        self.lengths = torch.zeros(0, dtype=torch.int64)  # tokens in the cache, of each
        self.cache: RaggedCache | None = None

    @property
    def width(self) -> int:
        """Tokens that the longest of its rows may have in the end."""
        return _width(self.rows)

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        if self.cache is None:
            return 0
        return sum(whole.nbytes for layer in self.cache.own for whole in (layer.keys, layer.values))

    def next(self) -> States:
        """The rows, and the hidden states [rows, hidden] after their last tokens."""
        if self.cache is None or not self.rows:
            return [], torch.zeros(0)
        long = self._set_long_apart()
        parts = [(0, long), (long, len(self.rows))] if long else [(0, len(self.rows))]
        hidden = torch.cat([self._pass(first, end) for first, end in parts])
        self.lengths = self.lengths + 1
        return list(self.rows), hidden

    def _pass(self, first: int, end: int) -> Tensor:
        """The hidden states after the last tokens of the rows in these places."""
        device, lengths = self.net.device, self.lengths[first:end]
        used = int(lengths.max()) + 1
        at = lengths.to(device)
        self._cache.advance(at, used, first)
        mask = None
        if int(lengths.min()) + 1 < used:  # slots behind the last token of a row are those of rows before it
            behind = torch.arange(used, device=device) > at[:, None]
            mask = torch.zeros(behind.shape, dtype=self.net.compute, device=device)
            mask = mask.masked_fill_(behind, torch.finfo(self.net.compute).min)[:, None, None]
        token = torch.tensor([[row.ids[-1]] for row in self.rows[first:end]], device=device)
        return self.net.hidden(token, at[:, None], mask, self.cache)[:, -1]

    def _set_long_apart(self) -> int:
        """Have the longest rows take the first places where they are worth a pass of their own; return how many.

        In one pass every row looks at as many slots as the longest has: a few rows that were left over make a batch of
        short ones several times as slow. A further pass reads the weights once more.
        """
        ordered, places = (self.lengths + 1).sort(descending=True, stable=True)
        whole = len(ordered) * int(ordered[0])
        if whole <= self._worth:
            return 0
        counts = torch.arange(1, len(ordered))
        slots = counts * ordered[0] + (len(ordered) - counts) * ordered[1:]
        if not len(slots) or whole - int(slots.min()) <= self._worth:
            return 0
        count = 1 + int(slots.argmin())
        longest = set(places[:count].tolist())
        free = [place for place in range(count) if place not in longest]
        for place, to in zip(sorted(place for place in longest if place >= count), free, strict=True):
            self._cache.swap(place, to, int(ordered[0]))
            self.rows[place], self.rows[to] = self.rows[to], self.rows[place]
            self.lengths[[place, to]] = self.lengths[[to, place]]
        return count

    @cached_property
    def _worth(self) -> int:
        """Slots of keys and values that take as long to read as another pass: twice the bytes of the weights."""
        weights = sum(weight.nbytes for weight in self.net.model.parameters())
        return 2 * weights // max(1, self.net.cache_bytes_per_token())

    def make_room(self, coming: list[RunningRow], room: int) -> None:
        """Have a cache for its rows and others that come, of at most ``room`` tokens unless they need more.

        It stays as large as it was, and has half as many rows again when it grows, as far as the room goes.
        """
        rows = [*self.rows, *coming]
        count, width = len(rows), _width(rows)
        if not count:
            return
        if self.cache is None:
            self.cache = RaggedCache(self.net.config.num_hidden_layers, count, width, self.net.compute)
            return
        wide, more = max(width, self.cache.width), self.cache.rows
        if max(count, more) * wide > room:  # most of its rows, or the widest one, may have left long ago
            wide = width
        if count > more:
            more = max(count, more * 3 // 2)
        more = min(more, max(count, room // wide))
        if (more, wide) != (self.cache.rows, self.cache.width):
            used = int(self.lengths.max()) if len(self.lengths) else 0
            self.cache.grow(more, wide, used)

    def join(self, rows: list[RunningRow]) -> States:
        """Take rows in, which there is room for; hidden states after their tokens. Equal tokens are computed once."""
        if not rows:
            return [], torch.zeros(0)
        net = self.net
        texts: dict[tuple[int, ...], list[RunningRow]] = {}
        for row in rows:
            texts.setdefault(row.tokens, []).append(row)
        ordered = sorted(texts, key=len, reverse=True)
        joined = [row for text in ordered for row in texts[text]]
        place, found = len(self.rows), []
        self.rows += joined
        for part in _of_like_length(ordered, prefill_tokens(net.device)):
            counts = torch.tensor([len(texts[text]) for text in part])
            source = torch.arange(len(part)).repeat_interleave(counts).to(net.device)
            lengths = torch.tensor([len(text) for text in part])
            width = len(part[0])
            ids = torch.tensor([[*text, *[net.filler] * (width - len(text))] for text in part], device=net.device)
            into = torch.arange(place, place + len(source), device=net.device)
            self._cache.begin(into, source)
            positions = torch.arange(width, device=net.device).expand(len(ids), -1)
            hidden = net.hidden(ids, positions, cache=self._cache)
            last = hidden[torch.arange(len(part), device=net.device), lengths.to(net.device) - 1]
            found.append(last[source])
            self.lengths = torch.cat([self.lengths, lengths.repeat_interleave(counts)])
            place += len(source)
        return joined, torch.cat(found)

    def leave(self, rows: list[RunningRow]) -> None:
        """Let rows go: the last ones take their places."""
        for row in rows:
            place, last = self.rows.index(row), len(self.rows) - 1
            if place != last:
                self._cache.move(last, place, int(self.lengths[last]))
                self.rows[place], self.lengths[place] = self.rows[last], self.lengths[last]
            self.rows.pop()
            self.lengths = self.lengths[:last]
        if not self.rows:
            self.cache = None

    @property
    def _cache(self) -> RaggedCache:
        assert self.cache is not None, "rows are in a cache"
        return self.cache


def _width(rows: list[RunningRow]) -> int:
    return max((len(row.prompt) + row.limit for row in rows), default=0)


def _of_like_length(ordered: list[tuple[int, ...]], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield texts, the longest first, that are computed together: at most ``most`` tokens with what pads them.

    One that goes on after a publish may be much longer than those that begin. These are not padded to its length where
    that saves half of them, and more than ``_ANOTHER_PASS`` tokens.
    """
    while ordered:
        longest, count = len(ordered[0]), 1
        while count < len(ordered) and (count + 1) * longest <= most:
            padding = longest - len(ordered[count])
            if 2 * padding > longest and (len(ordered) - count) * padding > _ANOTHER_PASS:
                break
            count += 1
        yield ordered[:count]
        ordered = ordered[count:]


class Cohort:
    """Rows of one length that joined together, in the model's own cache: ``Cohort(net, rows)``.

    Where a row has left, its place is computed on until all have.
    """

    def __init__(self, net: Net, rows: list[RunningRow]) -> None:
        self.rows = rows
        self.room = sum(len(row.prompt) + row.limit for row in rows)
        self._here: list[RunningRow | None] = list(rows)
        self._t = 0
        self._decoder = Plain(net, torch.tensor([row.tokens for row in rows], device=net.device))

    @property
    def is_over(self) -> bool:
        """Whether all have left."""
        return not any(self._here)

    def first(self) -> States:
        """The rows, and the hidden states after their tokens."""
        return list(self.rows), self._decoder.first()

    def next(self) -> States:
        """The rows that are left, and the hidden states after their last tokens."""
        token = torch.tensor([row.ids[-1] for row in self.rows], device=self._decoder.ids.device)
        hidden = self._decoder.next(token, self._t)
        self._t += 1
        left = [place for place, row in enumerate(self._here) if row is not None]
        return [self.rows[place] for place in left], hidden[left]

    def leave(self, rows: set[RunningRow]) -> None:
        """Let rows go."""
        self._here = [None if row in rows else row for row in self._here]
