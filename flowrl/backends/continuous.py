"""A continuous batch: rows of several calls that join and leave between two tokens, whatever computes their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from ..errors import DataError, FlowError, RunError
from ..workers.decode_passes import DecodePasses, PassMeter
from ..workers.model_options import Sampling
from ..workers.streaming import FailedCall, PrefixTokens, Reason, SampledRow, SampleRequest, last_spans
from ..workers.tokens.row_support import CallSupport, RowSupport
from .draw import kept_ids, uniforms

#: Draws for some of the rows of a step, by their places in it: ``draw(places, uniform, sampling, seen, kept)`` gives
#: what :func:`flowrl.backends.draw.draw_from` does.
Draw = Callable[[Tensor, Tensor | None, Sampling, Tensor | None, list[Tensor] | None], tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True, eq=False)
class RunningRow:
    """A row that has not left: ``RunningRow(call=1, row=0, prompt=(5, 6), seed=7, start=0, limit=64, ...)``.

    ``tokens`` are its prompt and what it has so far, ``seen`` the same as bool[vocab] where they are penalised.
    ``of_call``: what its call records of the tokens that could be drawn, where it does; ``support`` are the row's.
    """

    call: int
    row: int
    prompt: tuple[int, ...]
    seed: int
    start: int
    limit: int
    sampling: Sampling
    stops: frozenset[int]
    of_call: CallSupport | None = None
    ids: list[int] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    seen: Tensor | None = None
    support: RowSupport = field(default_factory=RowSupport)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.ids)

    def add(self, token: int, plain: float, sampled: float, version: int) -> None:
        """Take a token that the weights of ``version`` gave."""
        self.ids.append(token)
        self.plain.append(plain)
        self.sampled.append(sampled)
        self._extend(version, 1)
        if self.seen is not None and token < len(self.seen):
            self.seen[token] = True

    def _extend(self, version: int, tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += tokens
        else:
            self.spans.append([version, tokens])

    def go_on_from(self, row: SampledRow) -> None:
        """Take the tokens that a row had elsewhere. Raises DataError as :meth:`record`."""
        self.ids += row.ids
        self.plain += row.rollout_logprobs
        self.sampled += row.sampling_logprobs
        for version, tokens in row.versions:
            self._extend(version, tokens)
        if self.of_call is not None and row.support is not None:
            self.support.extend(row.support)
            self.of_call.count(len(self.support.sizes), len(row.support.ids))

    def record(self, ids: Sequence[int]) -> None:
        """Record which ids could be drawn, all where there are none. Raises DataError where a call has too many."""
        if self.of_call is not None:
            self.support.add(ids)
            self.of_call.count(len(self.support.sizes), len(ids))

    def ended(self, reason: Reason) -> SampledRow:
        """The row as it is returned."""
        spans = tuple((version, tokens) for version, tokens in self.spans)
        plain, sampled = tuple(self.plain), tuple(self.sampled)
        support = None if self.of_call is None else self.support
        return SampledRow(self.call, self.row, tuple(self.ids), plain, sampled, spans, reason, support)

    def since(self, known: int) -> SampledRow:
        """The row as it would be aborted now, with the tokens alone behind those that are known."""
        spans = last_spans(self.spans, len(self.ids) - known)
        plain, sampled = tuple(self.plain[known:]), tuple(self.sampled[known:])
        support = None if self.of_call is None else self.support.since(known)
        return SampledRow(self.call, self.row, tuple(self.ids[known:]), plain, sampled, spans, "aborted", support)


class ContinuousBatch(ABC):
    """What rows, calls, versions and aborts come to; a subclass says how the next tokens are computed.

    ``positions``: tokens of a row at most, or None. ``ends``: ids that end every row.
    """

    publish_modes = ("drain", "interrupt", "continue")
    most_rows: int | None = None  # all rows get a token in each step

    def __init__(self, positions: int | None, ends: Iterable[int]) -> None:
        self.positions, self._ends = positions, frozenset(ends)
        self._rows: dict[tuple[int, int], RunningRow] = {}
        self._calls = 0
        self._version = 0
        self._paused = self._asleep = False
        self._prefix = PrefixTokens()
        self.passes = PassMeter()

    # -- of the subclass ----------------------------------------------------------------------------------------------

    @abstractmethod
    def vocab(self) -> int:
        """How many tokens are predicted."""

    @abstractmethod
    def next_tokens(self, rows: list[RunningRow]) -> tuple[list[RunningRow], Draw]:
        """Of the rows that have not left, those that get a token now, and what draws it."""

    @abstractmethod
    def let_go(self, rows: list[RunningRow]) -> None:
        """Free what is kept of rows that have left."""

    @abstractmethod
    def forget_cache(self) -> None:
        """Compute what is kept of the running rows again."""

    def _now(self) -> float:
        """The time on the clock by which passes are measured."""
        return perf_counter()

    def end_of(self, row: RunningRow) -> Reason | None:
        """Whether a row ends with the token that it got last."""
        return "stop" if row.ids[-1] in row.stops else "length" if len(row.ids) >= row.limit else None

    def not_finite(self, what: str) -> FlowError:
        """The error of log-probabilities that are not finite."""
        return RunError(f"{what}.")

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> int:
        """Begin a call; see :meth:`flowrl.workers.streaming.Streams.submit`."""
        if self._asleep:
            raise asleep()
        most, before = check_lengths(self.positions, request.prompts.lengths), request.kept_rows()
        sampling = request.sampling
        self._calls += 1
        call, stops = self._calls, self._ends.union(sampling.stop)
        texts = [tuple(prompt.tolist()) for prompt in request.prompts]
        recorded = CallSupport(request.rows) if sampling.support else None
        begun: list[RunningRow] = []
        for row, (seed, start) in enumerate(zip(request.seeds.tolist(), request.row_starts, strict=True)):
            prompt, had = texts[row // request.n], before.get(row)
            limit = sampling.max_tokens if most is None else min(sampling.max_tokens, most - len(prompt))
            made = RunningRow(call, row, prompt, seed, start, limit, sampling, stops, recorded)
            if had is not None:
                made.go_on_from(had)
            if had is None or had.reason == "aborted":
                begun.append(made)
        self._rows |= {(call, made.row): made for made in begun}
        return call

    def running(self) -> list[tuple[int, int]]:
        """Return ``(call, row)`` of the rows that have not left."""
        return list(self._rows)

    def waiting(self, call: int) -> bool:
        """Return whether rows of a call have no token yet."""
        return any(number == call and not row.ids for (number, _), row in self._rows.items())

    def tokens_since(self, known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
        """Return what rows have got; see :class:`flowrl.workers.streaming.TellsTokens`."""
        return grown_rows(self._rows.values(), known)

    def abort(self, call: int, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End rows of a call, or all; see :meth:`flowrl.workers.streaming.Streams.abort`."""
        wanted = [row for c, row in self._rows if c == call] if rows is None else list(dict.fromkeys(rows))
        found = [self._rows.pop((call, row)) for row in wanted if (call, row) in self._rows]
        self.let_go(found)
        return [row.ended("aborted") for row in found]

    def pause(self) -> None:
        """Make no tokens until :meth:`resume`."""
        self._paused = True
        self.passes.rest()

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on; see :meth:`flowrl.workers.streaming.Streams.resume`."""
        self._paused = False
        self.passes.rest()
        if version is not None:
            self._version = version
            if not keep_cache:
                self.forget_cache()

    def fall_asleep(self) -> None:
        """Make no tokens until :meth:`awake`, and keep nothing of the running rows but their tokens."""
        self._asleep = True
        self.passes.rest()
        self.forget_cache()

    def awake(self) -> None:
        """Go on, with keys and values that are computed again."""
        self._asleep = False

    def prefix_tokens(self) -> PrefixTokens:
        """Return the tokens that rows have brought, and those that were not computed."""
        return self._prefix

    def take_passes(self) -> tuple[DecodePasses, ...]:
        """Return how long passes took that were made since it was asked last."""
        return self.passes.take()

    def note_prefix(self, asked: int, found: int) -> None:
        """Note that rows have brought so many tokens, of which some were not computed."""
        self._prefix += PrefixTokens(asked, found)

    def step(self) -> list[SampledRow | FailedCall]:
        """Draw a token of each row that has a place; return what has ended."""
        if self._paused or self._asleep or not self._rows:
            return []
        rows, draw = self.next_tokens(list(self._rows.values()))
        context = sum(len(row.prompt) + len(row.ids) for row in rows)
        together: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            together.setdefault(row.sampling, []).append(place)
        failed: dict[int, FailedCall] = {}
        for sampling, places in together.items():
            group = [rows[place] for place in places]
            kept: list[Tensor] | None = [] if sampling.support else None
            uniform, seen = self._uniforms(group, sampling), self._seen(group, sampling)
            drawn = draw(torch.tensor(places), uniform, sampling, seen, kept)
            self._record(group, kept, failed)
            columns = (values.tolist() for values in drawn)
            finite = torch.isfinite(drawn[1]).tolist()
            for row, token, plain, sampled, right in zip(group, *columns, finite, strict=True):
                row.add(token, plain, sampled, self._version)
                if not right and row.call not in failed:
                    what = f"Log-probabilities of row {row.row} of call {row.call}"
                    error = self.not_finite(f"{what}, token {len(row.ids) - 1}, are not finite")
                    failed[row.call] = FailedCall(row.call, error)
        for call in failed:
            self.abort(call)
            self.forget_cache()  # of which others may get the places
        left: list[RunningRow] = []
        found: list[SampledRow | FailedCall] = list(failed.values())
        for row in rows:
            reason = None if row.call in failed else self.end_of(row)
            if reason is not None:
                del self._rows[row.call, row.row]
                left.append(row)
                found.append(row.ended(reason))
        self.let_go(left)
        self.passes.note(rows, context, self._now(), goes_on=bool(self._rows))
        if failed:
            self.passes.rest()  # the next pass computes what was forgotten
        return found

    def _record(self, rows: list[RunningRow], kept: list[Tensor] | None, failed: dict[int, FailedCall]) -> None:
        """Record which tokens could be drawn; a call that has too many of them fails."""
        for row, ids in zip(rows, kept_ids(kept or []), strict=kept is not None):
            if row.call not in failed:
                try:
                    row.record(ids)
                except DataError as error:
                    failed[row.call] = FailedCall(row.call, error)

    def _uniforms(self, rows: list[RunningRow], sampling: Sampling) -> Tensor | None:
        if sampling.greedy:
            return None
        seeds, at = zip(*((row.seed, row.start + len(row.ids)) for row in rows), strict=True)
        return uniforms(torch.tensor(seeds), torch.tensor(at))

    def _seen(self, rows: list[RunningRow], sampling: Sampling) -> Tensor | None:
        if sampling.repetition_penalty == 1.0:
            return None
        vocab = self.vocab()
        for row in rows:
            if row.seen is None:
                ids = torch.tensor(row.tokens)
                row.seen = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids[ids < vocab], True)
        return torch.stack([row.seen for row in rows if row.seen is not None])


def grown_rows(rows: Iterable[RunningRow], known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
    """Return rows that have more tokens than are known, by call and row, with the others alone; those of other calls
    are passed over."""
    found: list[SampledRow] = []
    for row in rows:
        if (of_call := known.get(row.call)) is not None and len(row.ids) > (before := of_call.get(row.row, 0)):
            found.append(row.since(before))
    return found


def asleep() -> RunError:
    """The error of a call to an engine that sleeps."""
    return RunError("This engine is asleep: its weights are not in memory.", fix="Call wake() first.")


def check_lengths(most: int | None, lengths: Tensor) -> int | None:
    """Return how many positions the model has, once every prompt is known to leave room for one more token."""
    if len(lengths) and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise DataError(f"The prompt of row {row} is empty.", fix="Give every prompt at least one token.")
    if most is not None and len(lengths) and int(lengths.max()) >= most:
        row = int(lengths.argmax())
        raise DataError(
            f"The prompt of row {row} has {int(lengths[row])} tokens; the model has {most} positions in all.",
            fix="Shorten or filter the prompts, or use a model with more positions.",
        )
    return most
