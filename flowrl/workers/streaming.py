"""What an engine may offer beyond whole calls: rows that leave one by one, of several calls in one batch.

A call is submitted, and each step of the engine returns the rows that have ended in it::

    call = engine.submit(SampleRequest(prompts, 2, seeds, Sampling(max_tokens=64)))
    while engine.running():
        for row in engine.step():
            ...

``flowrl/backends/stream.py`` drives any such engine, for threads and for asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

from ..errors import DataError, FlowError, RunError, WrongAnswer
from .engine import Engine, Generates
from .model_options import Sampled, Sampling
from .tokens.row_support import RowSupport, support_columns

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Column

#: How a row has ended: a stop token, its most tokens or the model's last position, or somebody who had enough.
Reason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class SampledRow:
    """A row that has left the batch.

    ``call`` is what :meth:`Streams.submit` returned, ``row`` the row's number in it. ``rollout_logprobs`` and
    ``sampling_logprobs`` are those of :class:`~flowrl.workers.model_options.Sampled`, one for each of ``ids``.
    ``versions`` are spans ``(version, tokens)`` in the order of the tokens: ``((3, 17), (4, 5))`` is 17 tokens of
    version 3, then 5 of version 4. An aborted row has the tokens that it had by then, which may be none. ``support``,
    where it was asked for: which tokens could be drawn at each place.

    >>> logprobs = (-0.5, -1.2, -0.1)
    >>> row = fl.testing.SampledRow(1, 0, (5, 7, 2), logprobs, logprobs, ((3, 2), (4, 1)), "stop")
    >>> row.token_versions
    (3, 3, 4)
    """

    call: int
    row: int
    ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    reason: Reason
    support: RowSupport | None = None

    def since(self, known: int) -> SampledRow:
        """Return the row with its tokens alone behind the first ones, which are known.

        >>> logprobs = (-0.5, -1.2, -0.1)
        >>> fl.testing.SampledRow(1, 0, (5, 7, 2), logprobs, logprobs, ((3, 2), (4, 1)), "stop").since(1).versions
        ((3, 1), (4, 1))
        """
        return replace(
            self,
            ids=self.ids[known:],
            rollout_logprobs=self.rollout_logprobs[known:],
            sampling_logprobs=self.sampling_logprobs[known:],
            versions=last_spans(self.versions, len(self.ids) - known),
            support=None if self.support is None else self.support.since(known),
        )

    def until(self, known: int) -> SampledRow:
        """Return the row as it was when it had so many tokens, and had not ended.

        >>> logprobs = (-0.5, -1.2, -0.1)
        >>> fl.testing.SampledRow(1, 0, (5, 7, 2), logprobs, logprobs, ((3, 2), (4, 1)), "stop").until(1).versions
        ((3, 1),)
        """
        return replace(
            self,
            ids=self.ids[:known],
            rollout_logprobs=self.rollout_logprobs[:known],
            sampling_logprobs=self.sampling_logprobs[:known],
            versions=last_spans(self.versions[::-1], known)[::-1],
            reason="aborted",
            support=None if self.support is None else self.support.until(known),
        )

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version of the weights behind each token."""
        return tuple(version for version, tokens in self.versions for _ in range(tokens))


def last_spans(spans: Sequence[Sequence[int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the spans ``(version, tokens)`` of so many tokens at the end.

    >>> last_spans([(3, 2), (4, 1)], 2)
    ((3, 1), (4, 1))
    """
    found: list[tuple[int, int]] = []
    for version, count in reversed(spans):
        if tokens <= 0:
            break
        found.append((version, min(count, tokens)))
        tokens -= count
    return tuple(reversed(found))


@dataclass(frozen=True)
class PrefixTokens:
    """Tokens that rows brought with them, ``asked``, and how many of these were ``found`` and not computed.

    A row brings its prompt; where its keys and values are computed again, all that it has. Tokens are found in a cache
    of prefixes, or as those of another row that is computed at the same time.

    >>> fl.testing.PrefixTokens(asked=96, found=72).share
    0.75
    """

    asked: int = 0
    found: int = 0

    @property
    def share(self) -> float:
        """The share that was found; 0 where nothing was asked."""
        return self.found / self.asked if self.asked else 0.0

    def __add__(self, other: PrefixTokens) -> PrefixTokens:
        return PrefixTokens(self.asked + other.asked, self.found + other.found)


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """What an engine is asked for: ``n`` rows of each prompt; row ``i`` is of prompt ``i // n``.

    ``prompts``: ``i32[*prompt]``. ``seeds`` i64[rows]: each row has its own. ``starts`` i64[rows]: how many numbers of
    a row's random sequence were used before; None is 0. A row that was aborted goes on where its tokens are put behind
    its prompt, and ``starts`` counts them. ``kept``: rows as another engine had them; see :meth:`kept_rows`. Raises
    DataError for another number of seeds or starts than rows.

    >>> import torch
    >>> prompts = fl.Column.of([[3], [5]], dim="prompt", dtype="i32")
    >>> fl.testing.SampleRequest(prompts, 2, torch.arange(4), fl.testing.Sampling(max_tokens=8)).rows
    4
    """

    prompts: Column
    n: int
    seeds: Tensor
    sampling: Sampling
    starts: Tensor | None = None
    kept: Sequence[SampledRow] = ()

    def __post_init__(self) -> None:
        for what, given in (("seeds", self.seeds), ("starts", self.starts)):
            if given is not None and len(given) != self.rows:
                raise DataError(f"{len(given)} {what} for {self.rows} rows.", fix="Give each row one of its own.")

    @property
    def rows(self) -> int:
        """How many rows are asked for."""
        return len(self.prompts) * self.n

    @property
    def row_starts(self) -> list[int]:
        """How many numbers of its random sequence each row has used before."""
        return [0] * self.rows if self.starts is None else self.starts.tolist()

    def kept_rows(self) -> dict[int, SampledRow]:
        """Return the rows that another engine had begun, by their numbers. Raises DataError for what cannot go on.

        They have their tokens from there, with log-probabilities and versions, and go on from these. Those of them that
        have ended are not begun, and do not leave again.

        >>> import torch
        >>> prompts = fl.Column.of([[3], [5]], dim="prompt", dtype="i32")
        >>> row = fl.testing.SampledRow(1, 2, (5, 7), (-0.5, -1.2), (-0.5, -1.2), ((3, 2),), "aborted")
        >>> asked = fl.testing.SampleRequest(prompts, 2, torch.arange(4), fl.testing.Sampling(), kept=[row])
        >>> list(asked.kept_rows())
        [2]
        >>> fl.testing.SampleRequest(prompts, 1, torch.arange(2), fl.testing.Sampling(), kept=[row]).kept_rows()
        Traceback (most recent call last):
        flowrl.errors.DataError: Row 2 of the rows that are kept is not among the 2 rows of the call.
        """
        found: dict[int, SampledRow] = {}
        for row in self.kept:
            tokens = len(row.ids)
            what = f"Row {row.row} of the rows that are kept"
            counts = {len(row.rollout_logprobs), len(row.sampling_logprobs), sum(count for _, count in row.versions)}
            most = self.sampling.max_tokens
            if not 0 <= row.row < self.rows:
                raise DataError(f"{what} is not among the {self.rows} rows of the call.")
            if row.row in found:
                raise DataError(f"{what} is there twice.")
            if counts != {tokens}:
                raise DataError(f"{what} has {tokens} tokens, and log-probabilities and versions of {sorted(counts)}.")
            if row.reason == "aborted" and tokens >= most:
                raise DataError(f"{what} has {tokens} tokens and has not ended; it has {most} at most.")
            if self.sampling.support and (row.support is None or len(row.support.sizes) != tokens):
                raise DataError(f"{what} does not say which tokens could be drawn.")
            found[row.row] = row
        return found


@dataclass(frozen=True)
class EngineCall:
    """What an op that samples yields: an engine, and what it asks of it. It is sent the answer.

    So a run may have the rows leave one by one, among those of other calls, while the op waits for all of its own.
    """

    engine: Generates
    request: SampleRequest

    def answer(self) -> Sampled:
        """Return what the engine gives to the whole call."""
        asked = self.request
        return self.engine.generate(asked.prompts, asked.n, asked.seeds, asked.sampling, asked.starts)


@dataclass(frozen=True)
class FailedCall:
    """A call that cannot go on: ``FailedCall(1, RunError("row 2 of call 1: ..."))``. Its rows have left the batch.

    The error names the row. Other calls go on.
    """

    call: int
    error: FlowError


class Streams(Generates, Protocol):
    """Samples rows of several calls in one batch, which rows join and leave between two tokens.

    A token depends on the row's seed, its place and the weights alone, as with ``generate``: not on the calls beside
    it, nor on when it was submitted. One thread at a time makes these calls.
    """

    @property
    def publish_modes(self) -> Sequence[str]:
        """What a publish may do while rows run, of ``drain``, ``interrupt`` and ``continue`` (see :meth:`resume`)."""
        ...

    def submit(self, request: SampleRequest) -> int:
        """Return the number of a new call, whose rows wait for the next steps.

        Raises DataError that names the row of a prompt that cannot be answered; then nothing was submitted. An engine
        that :func:`tells_tokens` takes rows that are ``kept``.
        """
        ...

    def step(self) -> list[SampledRow | FailedCall]:
        """Go on by a token of each running row; return what has ended, which may be nothing, in any order.

        An engine that samples in a process of its own waits a moment at most (0.05 s) for what that has ended. Nothing
        goes on where nothing runs or :meth:`pause` was called. An error that is raised is the engine's: it is of no
        more use.
        """
        ...

    def running(self) -> list[tuple[int, int]]:
        """Return ``(call, row)`` of each row that has not left, in the order of calls and rows; those that wait too."""
        ...

    def abort(self, call: int, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End rows of a call, or all of them; return them with the tokens that they have.

        Rows that have ended are passed over: each row is returned once, here or by :meth:`step`.
        """
        ...

    def prefix_tokens(self) -> PrefixTokens:
        """Return the tokens that rows have brought since the engine was opened, and those that were not computed.

        Of whole calls too.
        """
        ...

    def pause(self) -> None:
        """Stop between two tokens. Then the weights may be written, until :meth:`resume`."""
        ...

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on. ``version`` names the weights that are in place now, and with them the tokens from here on.

        None: they are as they were. Else keys and values of running rows are those of other weights. They are computed
        again (``interrupt``), or stay with ``keep_cache`` (``continue``), where ``publish_modes`` has it. What was kept
        of prompts is forgotten in any case. The first version is 0.
        """
        ...


def streams(engine: Engine) -> TypeGuard[Streams]:
    """Return whether rows of an engine leave one by one."""
    return hasattr(engine, "submit")


class Waits(Protocol):
    """An engine that knows which rows wait for a place in the batch."""

    def waiting(self, call: int) -> bool:
        """Return whether rows of a call have no place in the batch yet."""
        ...


def knows_waiting(engine: object) -> TypeGuard[Waits]:
    """Return whether an engine says which rows wait; those of another count as in the batch once they are submitted."""
    return hasattr(engine, "waiting")


class TellsTokens(Protocol):
    """An engine that tells the tokens of rows while these run: another one can go on from them."""

    def tokens_since(self, known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
        """Return the rows of some calls that run and have more tokens than are ``known`` of them, by call and row.

        Each is as :meth:`Streams.abort` would return it now, with the tokens alone that are not known.
        """
        ...


def tells_tokens(engine: object) -> TypeGuard[TellsTokens]:
    """Return whether an engine tells the tokens of rows that run, and goes on from those that another one has told."""
    return hasattr(engine, "tokens_since")


class OnRanks(Protocol):
    """An engine that ``ranks`` have together, each a part of it: all make the same calls, in the same order."""

    @property
    def ranks(self) -> int:
        """How many."""
        ...

    def any_rank(self, said: bool) -> bool:
        """Return whether any of its ranks says so; each of them has to ask. RunError where their rows are not alike."""
        ...


def on_ranks(engine: object) -> TypeGuard[OnRanks]:
    """Return whether an engine is on several ranks, which have to agree on what each would decide by itself."""
    return getattr(engine, "ranks", 1) > 1


def drawn_apart(title: str) -> RunError:
    """Return the error of an engine whose ranks have other rows: from here on none would compute what is right."""
    return RunError(
        f"The ranks that split '{title}' have drawn other tokens for the same rows.",
        fix="Give them processors of one kind and one version of the engine; if they have, report it.",
    )


def gathered(rows: Iterable[SampledRow], sampling: Sampling, *, versions: bool = False) -> Sampled:
    """Return the rows of one call, in the order of their numbers, as ``generate`` returns them.

    ``finished`` says whether a stop token ended a row. Where the distribution that was sampled from is the policy's,
    both log-probabilities are one column. ``versions``: with that of each token. Raises WrongAnswer for a row that is
    not there, or twice.
    """
    import torch

    from ..batch import Column

    ordered = sorted(rows, key=lambda row: row.row)
    for place, row in enumerate(ordered):
        if row.row != place:
            what = f"row {row.row} has left twice" if row.row < place else f"row {place} has not left"
            raise WrongAnswer(f"Of call {row.call} {what}.")
    lengths = [len(row.ids) for row in ordered]

    def column(values: Iterable[Any], dtype: torch.dtype) -> Column:
        return Column.packed(torch.tensor([v for part in values for v in part], dtype=dtype), lengths, "response")

    plain = column((row.rollout_logprobs for row in ordered), torch.float32)
    own = sampling.is_policy
    support = [row.support for row in ordered if row.support is not None]
    return Sampled(
        column((row.ids for row in ordered), torch.int32),
        plain,
        plain if own else column((row.sampling_logprobs for row in ordered), torch.float32),
        torch.tensor([row.reason == "stop" for row in ordered], dtype=torch.bool),
        sampling.row_temperature,
        support_columns(support) if sampling.support and len(support) == len(ordered) else None,
        versions=column((row.token_versions for row in ordered), torch.int32) if versions else None,
    )


def lost(call: int, row: int, what: str) -> FailedCall:
    """Return the failure of a call by one of its rows: ``lost(3, 0, "its process is gone")``."""
    return FailedCall(call, RunError(f"Row {row} of call {call}: {what}"))
