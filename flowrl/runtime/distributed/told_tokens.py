"""What ranks tell of the rows that they sample, so that others can go on from it, and what the driver has heard."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from ...workers.streaming import Reason, SampledRow
from ...workers.tokens.row_support import RowSupport
from ..local.shared_engine import KeptRows


@dataclass(frozen=True, slots=True)
class ToldTokens:
    """Tokens that rows have got: ``ToldTokens.of(KeptRows(rows), number=3)``, in message 3 of a call.

    A token takes 8 bytes, 12 where it was drawn from another distribution than the policy's, and 4 for each other one
    that could be drawn where that is recorded; a row takes 12 bytes and 8 for each version. Log-probabilities are f32,
    as in the rows of a call. ``rows`` are (row, tokens, spans), ``spans`` (version, tokens); ``sampled`` is empty where
    all are those of ``plain``; ``ended`` says how rows have ended.
    """

    number: int
    kept_cache: bool
    rows: array[int]
    spans: array[int]
    ids: array[int]
    plain: array[float]
    sampled: array[float]
    ended: Mapping[int, Reason]
    support: tuple[array[int], array[int]] | None = None  # ids that could be drawn, and how many of each token

    @staticmethod
    def of(kept: KeptRows, number: int = 0) -> ToldTokens:
        """Pack rows. Those that have not ended have the reason ``aborted``."""
        rows = kept.rows
        counts = ((row.row, len(row.ids), len(row.versions)) for row in rows)
        plain = array("f", chain.from_iterable(row.rollout_logprobs for row in rows))
        sampled = array("f", chain.from_iterable(row.sampling_logprobs for row in rows))
        recorded = [row.support for row in rows if row.support is not None]
        support = None
        if recorded and len(recorded) == len(rows):
            ids, sizes = array("i"), array("i")
            for each in recorded:
                ids.extend(each.ids)
                sizes.extend(each.sizes)
            support = ids, sizes
        return ToldTokens(
            number,
            kept.kept_cache,
            array("i", chain.from_iterable(counts)),
            array("i", chain.from_iterable(span for row in rows for span in row.versions)),
            array("i", chain.from_iterable(row.ids for row in rows)),
            plain,
            array("f") if sampled == plain else sampled,
            {row.row: row.reason for row in rows if row.reason != "aborted"},
            support,
        )

    def __iter__(self) -> Iterator[SampledRow]:
        """Yield the rows, as those of call 0."""
        at = span = drawn = 0
        sampled = self.sampled or self.plain
        for place in range(0, len(self.rows), 3):
            row, tokens, spans = self.rows[place : place + 3]
            end, versions = at + tokens, self.spans[span : span + 2 * spans]
            support = None
            if self.support is not None:
                sizes = self.support[1][at:end]
                last = drawn + sum(sizes)
                support, drawn = RowSupport(self.support[0][drawn:last], sizes), last
            yield SampledRow(
                0,
                row,
                tuple(self.ids[at:end]),
                tuple(self.plain[at:end]),
                tuple(sampled[at:end]),
                tuple(zip(versions[::2], versions[1::2], strict=True)),
                self.ended.get(row, "aborted"),
                support,
            )
            at, span = end, span + 2 * spans

    @property
    def bytes(self) -> int:
        """How many it has."""
        parts = (self.rows, self.spans, self.ids, self.plain, self.sampled, *(self.support or ()))
        return sum(part.itemsize * len(part) for part in parts)


@dataclass(slots=True)
class _Heard:
    """What was heard of a row."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    plain: array[float] = field(default_factory=lambda: array("f"))
    sampled: array[float] = field(default_factory=lambda: array("f"))
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    support: RowSupport | None = None
    reason: Reason = "aborted"

    def add(self, row: SampledRow) -> None:
        self.ids.extend(row.ids)
        self.plain.extend(row.rollout_logprobs)
        self.sampled.extend(row.sampling_logprobs)
        for version, tokens in row.versions:
            if self.spans and self.spans[-1][0] == version:
                tokens += self.spans.pop()[1]
            self.spans.append((version, tokens))
        if row.support is not None:
            self.support = self.support or RowSupport()
            self.support.ids.extend(row.support.ids)
            self.support.sizes.extend(row.support.sizes)
        self.reason = row.reason

    def row(self, number: int) -> SampledRow:
        plain, sampled, spans = tuple(self.plain), tuple(self.sampled), tuple(self.spans)
        return SampledRow(0, number, tuple(self.ids), plain, sampled, spans, self.reason, self.support)


class HeardTokens:
    """What was heard of the rows that a rank samples of a call. A message counts once, however often it comes.

    >>> logprobs = (-0.5, -1.0)
    >>> row = fl.testing.SampledRow(0, 4, (5, 7), logprobs, logprobs, ((3, 2),), "aborted")
    >>> heard = HeardTokens()
    >>> for number in (1, 2, 2):
    ...     size = heard.take([ToldTokens.of(KeptRows((row,)), number)])
    >>> heard.rows()[0].ids, heard.rows()[0].versions, heard.last, heard.unfinished
    ((5, 7, 5, 7), ((3, 4),), 2, [4])
    """

    def __init__(self) -> None:
        self.last = 0  # the number of the message that was heard last
        self._messages: list[ToldTokens] = []  # put together once somebody has to go on from them

    @staticmethod
    def of(told: ToldTokens) -> HeardTokens:
        """Return what is heard of rows that begin with these tokens, whose next message is the first one."""
        heard = HeardTokens()
        heard._messages.append(told)
        return heard

    def take(self, told: Iterable[ToldTokens]) -> int:
        """Take messages of a rank, in their order. Returns the bytes of those that are new."""
        size = 0
        for message in told:
            if message.number <= self.last:
                continue
            self.last, size = message.number, size + message.bytes
            self._messages.append(message)
        return size

    def rows(self) -> tuple[SampledRow, ...]:
        """Return the rows as they were heard of."""
        rows: dict[int, _Heard] = {}
        for message in self._messages:
            for row in message:
                rows.setdefault(row.row, _Heard()).add(row)
        return tuple(heard.row(number) for number, heard in rows.items())

    @property
    def unfinished(self) -> list[int]:
        """The tokens of each row that is known to have some and not to have ended."""
        return [len(row.ids) for row in self.rows() if row.reason == "aborted" and row.ids]

    def hand_on(self) -> ToldTokens | None:
        """Return what was heard, for the rank that is to go on from it: its messages are counted from 1 again."""
        self.last = 0
        if not self._messages:
            return None
        kept_cache = any(message.kept_cache for message in self._messages)
        self._messages = [ToldTokens.of(KeptRows(self.rows(), kept_cache))]
        return self._messages[0]
