"""The stream of a policy on other ranks, as an environment here asks it: rows join the batches of their engines and
leave them one by one, each rank when it has some."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ....errors import WrongAnswer
from ....workers.decode_slots import EngineSlots
from ....workers.streaming import SampledRow, SampleRequest
from ....workers.tokens.check_sampled import check_row
from ..balance_rows import by_prefix
from ..protocol import Asked, Failed, Offers, Polled, Serving
from .policy_rows import PATIENCE

if TYPE_CHECKING:
    from ....batch import Column
    from .peers import Begun, Peers

#: Seconds after which who waits for rows looks at what else there is to do.
TICK = 0.01
#: Seconds that a rank waits for rows where somebody listens to some: then it says what these have so far.
SHOWN_EVERY = 0.05


class RemoteCall:
    """A call whose rows come as they end. ``at``: of each row the place of its rank, and its number there."""

    def __init__(self, number: int, at: Sequence[tuple[int, int]], sizes: Sequence[int]) -> None:
        self.number, self.at, self.sizes = number, at, sizes
        self.rows = {where: row for row, where in enumerate(at)}
        self.left = set(range(len(at)))
        self.aborted = set[int]()  # those that were on their way then are not looked at

    @property
    def is_over(self) -> bool:
        """Whether all of its rows have been handed out."""
        return not self.left


@dataclass(eq=False)
class _Engine:
    """The engine of one rank: what it is asked, and what is known of it. ``place``: of the rank among the policy's."""

    rank: int
    place: int
    queued: list[Asked] = field(default_factory=list[Asked])  # calls that it is told of next
    latest: int = 0  # the largest number that it was told of
    open: int = 0  # rows that it is at
    load: int = 0  # tokens that these came with
    seeds: set[int] = field(default_factory=set[int])  # of the rows that it has had
    first: int | None = None  # its steps when the first of these came
    steps: int = 0  # its steps now
    used: int = 0  # tokens that it has sampled


@dataclass(frozen=True, eq=False)
class _Poll:
    """What an engine was asked and has not answered; ``waits``: until there are rows. ``heard``: tokens that were known
    of rows that somebody listens to."""

    engine: _Engine
    begun: Begun
    waits: bool
    heard: Mapping[int, Mapping[int, int]]


class RemoteStream:
    """Calls for the engines of a policy; see :class:`flowrl.backends.stream.Stream`. One thread uses it.

    A rank is asked for more as soon as it has answered, whatever the others are at. A row that goes on stays where it
    was, as its tokens are known there. New ones go where the rows of their prompt are, as long as that rank is not at
    much more than others.
    """

    def __init__(self, at: Serving, peers: Peers, offers: Offers) -> None:
        self._at, self._peers, self._offers = at, peers, offers
        self.follows, self.kept_cache = at.follows, False
        self._version = at.version  # of the newest weights that an engine was known to have
        self._name = secrets.token_hex(8)
        self._engines = [_Engine(rank, place) for place, rank in enumerate(at.ranks)]
        self._homes: dict[int, int] = {}  # places of ranks, by the seed of a row
        self._prompts: dict[bytes, int] = {}  # and by the prompt that it began with
        self._calls: dict[int, RemoteCall] = {}
        self._polls: list[_Poll] = []
        self._found: list[SampledRow] = []
        self._numbers = 0
        self._listens = False  # somebody has
        self._heard: dict[tuple[int, int], int] = {}  # tokens that are known of rows that somebody listens to
        self._grown: dict[tuple[int, int], tuple[int, SampledRow]] = {}  # what came of them behind so many tokens

    def submit(self, request: SampleRequest) -> RemoteCall:
        """Begin a call of one row for each prompt. The ranks are told of it by the next :meth:`rows_of`."""
        assert request.n == 1 and not request.kept, "who asks a policy row by row has a prompt for each"
        prompts, seeds, starts = request.prompts, request.seeds, request.starts
        self._numbers += 1
        at: list[tuple[int, int]] = [(0, 0)] * len(prompts)
        sizes = [int(length) + 1 for length in prompts.lengths]
        for place, rows in enumerate(self._spread(prompts, seeds.tolist(), sizes)):
            if not rows:
                continue
            engine = self._engines[place]
            some = None if starts is None else starts[rows]
            part = replace(request, prompts=prompts.take(rows), seeds=seeds[rows], starts=some)
            engine.queued.append(Asked(self._numbers, part))
            engine.seeds.update(seeds[rows].tolist())
            engine.load += sum(sizes[row] for row in rows)
            engine.open += len(rows)
            for number, row in enumerate(rows):
                at[row] = place, number
        call = self._calls[self._numbers] = RemoteCall(self._numbers, at, sizes)
        return call

    def rows_of(self, calls: Collection[RemoteCall]) -> list[SampledRow]:
        """Return rows of some calls that have ended; none where none has in a short time.

        Raises what failed on a rank, and WrongAnswer for what cannot be right.
        """
        self._ask()
        if not self._found:
            self._hear(TICK)
        wanted = {call.number for call in calls}
        found = [row for row in self._found if row.call in wanted]
        self._found = [row for row in self._found if row.call not in wanted]
        for call in [each for each in calls if each.is_over and not each.aborted]:
            del self._calls[call.number]
        return found

    def tokens_since(self, known: Mapping[RemoteCall, Mapping[int, int]]) -> list[SampledRow]:
        """Return what came of rows that run and have more tokens than are ``known`` of them, by call and row, with
        these alone. The ranks are asked for more of all these rows from here on, and of no others.
        """
        self._listens |= bool(known)
        self._heard = {(call.number, row): count for call, rows in known.items() for row, count in rows.items()}
        found: list[SampledRow] = []
        for place, (before, row) in self._grown.items():
            if (count := self._heard.get(place)) is not None and before <= count < before + len(row.ids):
                found.append(row.since(count - before))
        self._grown.clear()
        return found

    def abort_rows(self, wanted: Mapping[RemoteCall, Iterable[int] | None]) -> list[SampledRow]:
        """End some rows of each of these calls, or all of them; return them with the tokens that they have.

        A rank that is gone has no rows: who asks it next is told.
        """
        parts: list[dict[int, list[int]]] = [{} for _ in self._engines]
        for call, rows in wanted.items():
            for row in sorted(call.left if rows is None else call.left.intersection(rows)):
                place, number = call.at[row]
                parts[place].setdefault(call.number, []).append(number)
        asked: list[tuple[_Engine, Begun]] = []
        for engine, part in zip(self._engines, parts, strict=True):
            if part:
                if engine.queued:
                    self._tell(engine, waits=False)
                words = (self._at, self._name, part, engine.latest)
                asked.append((engine, self._peers.call(engine.rank, "abort_rows", *words)))
        found = [row for engine, begun in asked for row in self._ended(engine, begun)]
        for place, part in enumerate(parts):
            for number, rows in part.items():
                call = self._calls[number]
                call.aborted.update(call.rows[place, row] for row in rows)
                self._drop(place, call, rows)
        return found

    def leave(self, calls: Collection[RemoteCall]) -> list[SampledRow]:
        """End all rows of some calls, which are all that there are: nothing more is asked. See :meth:`abort_rows`."""
        found = self.abort_rows(dict.fromkeys(calls))
        for engine in self._engines:
            if engine.latest:
                self._peers.call(engine.rank, "leave_policy", self._at, self._name, engine.latest)
        self._polls.clear()
        self._name = secrets.token_hex(8)
        return found

    def take_slots(self) -> list[EngineSlots]:
        """Return the decode slots that its rows had since they were asked for, of engines that know it."""
        counts = [
            EngineSlots(self._at.name, e.rank, e.used, len(e.seeds), e.first, e.steps, self._offers.most_rows)
            for e in self._engines
            if e.first is not None and self._offers.counts_slots
        ]
        for engine in self._engines:
            engine.first, engine.used = None, 0
            engine.seeds.clear()
        return counts

    # -- which rank ---------------------------------------------------------------------------------------------------

    def _spread(self, prompts: Column, seeds: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
        """Return the rows of each rank, and remember where they are."""
        shares: list[list[int]] = [[] for _ in self._engines]
        loads = [engine.load for engine in self._engines]
        new: list[int] = []
        for row, seed in enumerate(seeds):
            home = self._homes.get(seed)
            if home is None:
                new.append(row)
            else:
                shares[home].append(row)
                loads[home] += sizes[row]
        begun = [prompts[row].numpy().tobytes() for row in new]
        homes = [self._prompts.get(prompt) for prompt in begun]
        parts = by_prefix([sizes[row] for row in new], len(shares), homes, begun, loads=loads)
        for place, part in enumerate(parts):
            shares[place] = sorted([*shares[place], *(new[i] for i in part)])
            self._homes |= {seeds[new[i]]: place for i in part}
            self._prompts |= {begun[i]: place for i in part}
        return shares

    # -- messages -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Tell ranks of new calls, and ask those for rows that are at some and were not asked."""
        for engine in self._engines:
            asked = [poll for poll in self._polls if poll.engine is engine]
            if engine.open and not any(poll.waits for poll in asked):
                self._tell(engine, waits=True)
            elif engine.queued and len(asked) < 2:
                self._tell(engine, waits=False)

    def _tell(self, engine: _Engine, *, waits: bool) -> None:
        queued, engine.queued = engine.queued, []
        engine.latest = max([engine.latest, *(asked.number for asked in queued)])
        heard: dict[int, dict[int, int]] = {}
        for (number, row), count in self._heard.items():
            if (call := self._calls.get(number)) is not None and row in call.left and call.at[row][0] == engine.place:
                heard.setdefault(number, {})[call.at[row][1]] = count
        patience = 0.0 if not waits else SHOWN_EVERY if self._listens else PATIENCE
        begun = self._peers.call(engine.rank, "poll", self._at, self._name, queued, patience, heard)
        self._polls.append(_Poll(engine, begun, waits, heard))

    def _hear(self, seconds: float) -> None:
        """Take the answers that are there, or come in time."""
        if not self._polls:
            return
        ready = set(self._peers.ready([poll.begun for poll in self._polls], seconds))
        answered = [poll for place, poll in enumerate(self._polls) if place in ready]
        self._polls = [poll for place, poll in enumerate(self._polls) if place not in ready]
        found = [(poll.engine, self._answer(poll)) for poll in answered]
        for engine, polled in found:
            is_told = polled.latest == engine.latest and not any(poll.engine is engine for poll in self._polls)
            if is_told and not engine.queued and engine.open and not polled.open:
                raise WrongAnswer(f"{self._at.name} on rank {engine.rank} has lost {engine.open} rows.")

    def _answer(self, poll: _Poll) -> Polled:
        """Take the answer to a question. Raises what it says to have failed."""
        engine, answer = poll.engine, poll.begun()
        try:
            if isinstance(answer, Failed):
                raise answer.raised(engine.rank)
            polled: Polled = answer
            engine.first = polled.first if engine.first is None else engine.first
            engine.steps = max(engine.steps, polled.steps)
            if self.follows:
                self._version, self.kept_cache = max(self._version, polled.version), self.kept_cache | polled.kept_cache
            for row in polled.rows:
                self._take_row(engine, row)
            for row in polled.grown:
                self._take_grown(poll, row)
        except WrongAnswer as error:
            error.what = f"{self._at.name} on rank {engine.rank}: {error.what}"
            raise
        return polled

    def _take_row(self, engine: _Engine, row: SampledRow) -> None:
        call = self._calls.get(row.call)
        number = None if call is None else call.rows.get((engine.place, row.row))
        if call is None or number is None or number not in call.left | call.aborted:
            raise WrongAnswer(f"row {row.row} of call {row.call} was not asked for, or was answered before.")
        check_row(row, self._version)
        engine.used += len(row.ids)
        if number in call.left:
            self._drop(engine.place, call, [row.row])
            self._found.append(replace(row, row=number))

    def _take_grown(self, poll: _Poll, row: SampledRow) -> None:
        """Keep what came of a row that somebody listens to, unless it has ended by another answer."""
        call, before = self._calls.get(row.call), poll.heard.get(row.call, {}).get(row.row)
        if before is None:
            raise WrongAnswer(f"nobody listens to row {row.row} of call {row.call}.")
        check_row(row, self._version)
        number = None if call is None else call.rows.get((poll.engine.place, row.row))
        if call is not None and number in call.left:
            self._grown[row.call, number] = before, replace(row, row=number)

    def _ended(self, engine: _Engine, begun: Begun) -> list[SampledRow]:
        """Return the rows that a rank has ended; none where it is gone."""
        try:
            answer = begun()
        except Exception:
            return []
        rows: list[SampledRow] = [] if isinstance(answer, Failed) else answer
        engine.used += sum(len(row.ids) for row in rows)
        return [replace(row, row=self._calls[row.call].rows[engine.place, row.row]) for row in rows]

    def _drop(self, place: int, call: RemoteCall, rows: Iterable[int]) -> None:
        """Note that a rank is at some rows no more."""
        for number in rows:
            row = call.rows[place, number]
            if row in call.left:
                call.left.discard(row)
                self._engines[place].open -= 1
                self._engines[place].load -= call.sizes[row]
