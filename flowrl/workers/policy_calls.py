"""How sessions ask a policy: rows that join the engine's batch one by one, or whole calls of all that wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from .decode_slots import EngineSlots, count_slots, counts_slots
from .streaming import SampledRow, SampleRequest
from .tokens.packed_tokens import pack
from .tokens.row_support import RowSupport, not_recorded, rows_of_columns
from .tokens.sampling import SamplingArguments

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Column
    from .model_options import Sampling


class Listener(Protocol):
    """Who waits for the answer to an ask."""

    @property
    def streams(self) -> bool:
        """Whether it is shown the tokens as they come."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether it waits no longer."""
        ...

    def show(self, ids: Sequence[int]) -> None: ...


@dataclass(slots=True, eq=False)
class Ask:
    """What a session asks for: tokens behind those of ``prompt`` and ``response``, which stay as they are meanwhile.

    ``Ask(7, [5, 6], seed=91, start=1, response=[2])``. ``start``: how many numbers of its random sequence were used
    before. ``most``: tokens at most; None is as the call says. ``listener`` is told of the tokens as they come, by an
    engine that tells them, and its row is ended where it is gone. ``follows``: the session has had an answer for this
    episode, and has told it to its environment.
    """

    session: int
    prompt: list[int]
    seed: int
    start: int
    most: int | None = None
    listener: Listener | None = None
    response: Sequence[int] = ()
    follows: bool = False


@dataclass(slots=True)
class Answer:
    """What the policy sampled for a session: ids, both log-probabilities and the version of each, and how it ended.

    ``Answer(7, (5, 2), (-0.5, -1.2), (-0.5, -1.2), (3, 3), temperature=1.0, stopped=True)``. ``support``,
    where it was asked for: which tokens could be drawn at each place. ``kept_cache``: some tokens come from keys and
    values that were kept through a publish.
    """

    session: int
    ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    sampling_logprobs: Sequence[float]
    versions: Sequence[int]
    temperature: float
    stopped: bool  # by a stop token
    support: RowSupport | None = None
    kept_cache: bool = False

    def text(self, tokenizer: Any, until: int | None = None) -> str:
        """Return its text, or that of its first tokens."""
        return tokenizer.decode(list(self.ids[:until]), skip_special_tokens=True)

    def until(self, count: int) -> Answer:
        """Return its first tokens alone, of which the last one stops it."""
        return replace(
            self,
            ids=self.ids[:count],
            rollout_logprobs=self.rollout_logprobs[:count],
            sampling_logprobs=self.sampling_logprobs[:count],
            versions=self.versions[:count],
            stopped=True,
            support=None if self.support is None else self.support.until(count),
        )


class PolicyCalls(Protocol):
    """What a scheduler of sessions asks of the policy."""

    @property
    def waiting(self) -> bool:
        """Whether answers are still to come."""
        ...

    def ask(self, asks: Sequence[Ask]) -> None: ...
    def answers(self) -> list[Answer]: ...
    def forget(self, sessions: Collection[int]) -> Mapping[int, int]:
        """Ask no more for some sessions; return how many tokens were sampled in vain, of those that had any."""
        ...

    def close(self) -> None: ...


def policy_calls(policy: Any, said: SamplingArguments) -> PolicyCalls:
    """Return how a policy is asked: row by row where rows leave its engine one by one, else in whole calls."""
    stream = getattr(policy, "stream", None)
    return WholeCalls(policy, said) if stream is None else StreamedCalls(policy, stream, said)


def _columns(asks: Sequence[Ask]) -> tuple[Column, Tensor, Tensor]:
    import torch

    prompts = pack(([*ask.prompt, *ask.response] for ask in asks), "prompt")
    seeds = torch.tensor([ask.seed for ask in asks], dtype=torch.int64)
    return prompts, seeds, torch.tensor([ask.start for ask in asks], dtype=torch.int64)


def _together(asks: Sequence[Ask], said: SamplingArguments) -> list[tuple[SamplingArguments, list[Ask]]]:
    """Asks that are sampled the same way, in the order of their sessions."""
    found: dict[int | None, list[Ask]] = {}
    for ask in sorted(asks, key=lambda ask: ask.session):
        found.setdefault(ask.most, []).append(ask)
    return [(said if most is None else replace(said, max_tokens=most), group) for most, group in found.items()]


class WholeCalls:
    """Whole calls of a policy, of all sessions that wait, one after another."""

    waiting = False

    def __init__(self, policy: Any, said: SamplingArguments) -> None:
        self._policy, self._said = policy, said
        self._asks: list[Ask] = []

    def ask(self, asks: Sequence[Ask]) -> None:
        """Have sessions be asked for with the next call."""
        self._asks += asks
        self.waiting = bool(self._asks)

    def answers(self) -> list[Answer]:
        """Return the answers to all that wait."""
        asks, self._asks, self.waiting = self._asks, [], False
        found: list[Answer] = []
        for said, group in _together(asks, self._said):
            sampled = self._policy.respond(*_columns(group), said)
            version = self._policy.read_version()
            if said.support and sampled.support is None:
                raise not_recorded()
            rows = zip(
                group,
                sampled.ids.to_list(),
                sampled.rollout_logprobs.to_list(),
                sampled.sampling_logprobs.to_list(),
                sampled.finished.tolist(),
                [None] * len(group) if sampled.support is None else rows_of_columns(sampled.support),
                strict=True,
            )
            for ask, ids, plain, own, stopped, support in rows:
                versions = [version] * len(ids)
                found.append(Answer(ask.session, ids, plain, own, versions, sampled.temperature, stopped, support))
        return found

    def forget(self, sessions: Collection[int]) -> Mapping[int, int]:
        """Ask for some sessions no more."""
        self._asks = [ask for ask in self._asks if ask.session not in sessions]
        self.waiting = bool(self._asks)
        return {}

    def close(self) -> None:
        """Nothing is under way between two calls."""


@dataclass(frozen=True, slots=True)
class _Streamed:
    """A call whose rows leave one by one, and whose they are."""

    call: Any
    asks: list[Ask]
    version: int
    how: Sampling
    is_policy: bool
    temperature: float


@dataclass(slots=True)
class _Heard:
    """A row that somebody listens to, and the tokens that it was shown."""

    of: _Streamed
    ask: Ask
    listener: Listener
    shown: list[int] = field(default_factory=list[int])


class StreamedCalls:
    """Rows of an engine's batch, which sessions join whenever they have something to ask."""

    def __init__(self, policy: Any, stream: Any, said: SamplingArguments) -> None:
        self._policy, self._stream, self._said = policy, stream, said
        self._calls: dict[int, _Streamed] = {}  # by number
        self._sessions: set[int] = set()
        self._heard: dict[tuple[int, int], _Heard] = {}  # by call and row
        self._tokens_since = getattr(stream, "tokens_since", None)
        self._counts = not hasattr(stream, "take_slots")  # else the stream does, of several engines
        self._steps = stream.steps if self._counts else 0
        self._used = 0  # decode slots

    @property
    def waiting(self) -> bool:
        """Whether rows are in the batch."""
        return bool(self._calls)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Have rows join the batch."""
        for said, group in _together(asks, self._said):
            prompts, seeds, starts = _columns(group)
            how = self._policy.how(said)
            call = self._stream.submit(SampleRequest(prompts, 1, seeds, how, starts))
            version = self._policy.read_version()
            self._sessions.update(ask.session for ask in group)
            made = self._calls[call.number] = _Streamed(call, group, version, how, how.is_policy, how.row_temperature)
            for i, ask in enumerate(group):
                if ask.listener is not None:
                    self._heard[call.number, i] = _Heard(made, ask, ask.listener)
        self._show_grown()  # an engine elsewhere learns who listens

    def answers(self) -> list[Answer]:
        """Go on by a token; return the rows that have ended, in the order of sessions."""
        rows = self._stream.rows_of([each.call for each in self._calls.values()])
        if self._heard:
            rows += self._tell(rows)
        found = [self._answer(row) for row in rows]
        self._calls = {number: each for number, each in self._calls.items() if not each.call.is_over}
        return sorted(found, key=lambda answer: answer.session)

    def _tell(self, ended: Sequence[SampledRow]) -> list[SampledRow]:
        """Tell those that listen what there is; end the rows of those that are gone, and return them."""
        for row in ended:
            self._heard.pop((row.call, row.row), None)
        gone: dict[Any, list[int]] = {}
        for (_, row), heard in self._heard.items():
            if heard.listener.is_gone:
                gone.setdefault(heard.of.call, []).append(row)
        for call, rows in gone.items():
            for row in rows:
                del self._heard[call.number, row]
        self._show_grown()
        return list(self._stream.abort_rows(gone))

    def _show_grown(self) -> None:
        """Show tokens to those that listen to their rows, as far as the engine tells them."""
        known: dict[Any, dict[int, int]] = {}
        for (_, row), heard in self._heard.items():
            if heard.listener.streams:
                known.setdefault(heard.of.call, {})[row] = len(heard.shown)
        if not known or self._tokens_since is None:
            return
        for row in self._tokens_since(known):
            heard = self._heard.get((row.call, row.row))
            if heard is not None and heard.listener.streams:
                heard.shown += row.ids
                heard.listener.show(tuple(heard.shown))

    def _answer(self, row: SampledRow) -> Answer:
        of = self._calls[row.call]
        self._used += len(row.ids)
        several = len(row.versions) > 1  # the weights have changed meanwhile
        told = several or self._stream.follows
        if of.how.support and row.support is None:
            raise not_recorded()
        return Answer(
            of.asks[row.row].session,
            row.ids,
            row.rollout_logprobs,
            row.rollout_logprobs if of.is_policy else row.sampling_logprobs,
            row.token_versions if told else (of.version,) * len(row.ids),
            of.temperature,
            row.reason == "stop",
            row.support,
            several and self._stream.kept_cache,
        )

    def forget(self, sessions: Collection[int]) -> Mapping[int, int]:
        """Take the rows of some sessions out of the batch."""
        wanted = {
            each.call: rows
            for each in self._calls.values()
            if (rows := [row for row, ask in enumerate(each.asks) if ask.session in sessions])
        }
        self._heard = {place: each for place, each in self._heard.items() if each.ask.session not in sessions}
        tokens: dict[int, int] = {}
        for row in self._stream.abort_rows(wanted):
            session = self._calls[row.call].asks[row.row].session
            tokens[session] = tokens.get(session, 0) + len(row.ids)
        self._used += sum(tokens.values())
        self._calls = {number: each for number, each in self._calls.items() if not each.call.is_over}
        return tokens

    def close(self) -> None:
        """Take all rows out of the batch."""
        calls = [each.call for each in self._calls.values()]
        self._calls.clear()
        self._heard.clear()
        self._used += sum(len(row.ids) for row in self._stream.leave(calls))
        count_slots(self._slots())

    def _slots(self) -> list[EngineSlots]:
        """Return the decode slots that its sessions had."""
        if not self._counts:
            return self._stream.take_slots()
        if not counts_slots(engine := self._stream.engine):
            return []
        name = self._policy.identity() if hasattr(self._policy, "identity") else ""
        sessions, steps = len(self._sessions), (self._steps, self._stream.steps)
        return [EngineSlots(name, None, self._used, sessions, *steps, engine.most_rows)]
