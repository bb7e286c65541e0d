"""Calls on ranks whose rows leave the engines one by one: the ranks of a worker sample for a short time whenever they
are asked, and say which calls are over by then.

Ranks that split a model are asked alike, in one order; the first one answers for them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import EngineLost, RankLost
from ....schedule.events import KeptTokens
from ...executor import RowsAgain
from ...values.call import Call
from ..protocol import Advanced, Failed, RankCall, Reply
from ..rank_client import RankClient
from ..recovery import remake_rows
from ..told_tokens import HeardTokens, ToldTokens
from ..worker_group import WorkerGroup
from .kept_results import fill_keys
from .pending_calls import CallOnRanks, Sent


@dataclass
class _Part:
    """What a rank was told of a call, in which epoch, and what has come of it.

    ``beside``: the ranks that compute with it, with what each has answered; it speaks for them.
    """

    rank_call: RankCall
    epoch: int
    number: int = 0  # as which the rank knows it
    answer: Reply | Failed | None = None
    entered: bool = False
    heard: HeardTokens = field(default_factory=HeardTokens)  # of its rows
    was_answered: bool = False  # before its rows were lost
    beside: dict[int, Reply | None] = field(default_factory=dict[int, "Reply | None"])

    def asked(self, rank: int) -> dict[int, RankCall]:
        """Return what this rank and those beside it are told."""
        return {rank: self.rank_call, **dict.fromkeys(self.beside, replace(self.rank_call, keep=0, frees=()))}


class StreamedCallOnRanks(CallOnRanks):
    """A call that samples on the ranks of ``group``: see :class:`flowrl.runtime.executor.SteppedCall`.

    Where a rank is lost that can be restarted as it was, the rows that it had not answered go on from the tokens that
    it has told. What a rank has answered is copied to another one at once: those beside it, and publishes in between,
    do not come again, so it could not be made once more.
    """

    def __init__(
        self,
        client: RankClient,
        call: Call,
        group: WorkerGroup,
        arguments: Mapping[str, Any],
        engine: EngineOnRanks,
        part: int = 0,
    ) -> None:
        self.engine, self.part, self.number = engine, part, client.new_id()
        self.parts: dict[int, _Part] = {}
        self._result: Any = None
        self._over = False
        self._sent: Sent | None = None
        super().__init__(client, call, group, arguments)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that sample it."""
        return tuple(self.parts)

    @property
    def has_entered(self) -> bool:
        """Whether all its rows have a place in the batch of their engine."""
        return bool(self.parts) and all(part.entered or part.answer is not None for part in self.parts.values())

    @property
    def has_answers(self) -> bool:
        """Whether all ranks have said what came of it."""
        return bool(self.parts) and all(part.answer is not None for part in self.parts.values())

    def step(self) -> bool:
        """Go on by a short time, unless the call is over; return whether it is. Raises what the call raised."""
        if not self._over:
            epoch, self._epoch = self._epoch, None
            try:
                self.client.retry(self._go_on, epoch)
            except BaseException:
                self.engine.calls.pop(self.number, None)  # nobody takes its result: others would wait for that
                raise
        return self._over

    def result(self) -> Any:
        """Wait for the call. Returns what it gives; raises what it raised on a rank, or RankLost."""
        while not self.step():
            pass
        return self._result

    def _choose_rank(self) -> int | None:
        """A prompt group that finishes on its own goes to the rank with the fewest rows."""
        return self.engine.choose_rank() if self.call.groups else None

    def _tell(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        epoch, number, team = self.client.epoch, self.client.new_id, self.engine.group.parts.team_of
        self.parts = {
            rank: _Part(call, epoch, number(), beside=dict.fromkeys(r for r in team(rank) if r != rank))
            for rank, call in calls.items()
            if rank in self.engine.group.parts.keepers
        }
        self.engine.calls[self.number] = self
        numbers = {r: part.number for rank, part in self.parts.items() for r in (rank, *part.beside)}
        return self.client.send("begin", {rank: (numbers[rank], call) for rank, call in calls.items()})

    def _go_on(self) -> None:
        first, self._first = self._first, None
        if isinstance(first, RankLost):
            raise first
        if not self.parts or self._sent is None:
            self._sent = first or self._send()
        self._forget_lost()
        if not self.has_answers:
            if not self.engine.has_results:
                self.engine.advance(self._describe())
            return
        del self.engine.calls[self.number]
        answers: dict[int, Any] = {}
        asked: dict[int, RankCall] = {}
        for rank, part in self.parts.items():
            answers |= {rank: part.answer, **{r: reply for r, reply in part.beside.items() if reply is not None}}
            asked |= part.asked(rank)
        same = {rank for rank, part in self.parts.items() if not self.client.restarted_after(part.epoch, rank)}
        sent = replace(self._sent, rank_calls=asked)
        _, self._result = self._gather(sent, answers, same)
        self._over = True

    def keep(self, rank: int, answer: Reply | Failed) -> list[Callable[[], None]]:
        """Take what came of the part of a rank, and have another rank keep its rows too. Returns what waits for
        that."""
        part = self.parts[rank]
        part.answer = answer
        sent = self._sent or self._first  # others may step the engine before this call does
        if isinstance(answer, Reply) and isinstance(sent, Sent):
            fill_keys({rank: part.rank_call}, {rank: answer})
            return self._begin_copies(replace(sent, rank_calls={rank: part.rank_call}), {rank: answer})
        return []

    def _forget_lost(self) -> None:
        """Forget the answers of ranks that are lost with rows of which nobody has a copy."""
        for rank, part in self.parts.items():
            gone = part.rank_call.keep and self.client.restarted_after(part.epoch, rank)
            if gone and self.client.lineage.copy_of(part.rank_call.keep) is None:
                part.was_answered = part.was_answered or part.answer is not None
                part.answer = None

    @property
    def _copied(self) -> bool:
        return True


class EngineOnRanks:
    """The engines of a worker's ranks, which calls share. One thread uses it, that of the pool; others ask how far the
    engines are, and whether rows run.

    ``calls`` are those that are not over, by number. ``on_kept`` is told in words of rows that go on elsewhere.
    """

    def __init__(
        self, client: RankClient, group: WorkerGroup, on_kept: Callable[[str], None] = lambda text: None
    ) -> None:
        self.client, self.group, self.on_kept = client, group, on_kept
        self.calls: dict[int, StreamedCallOnRanks] = {}
        self.steps = dict.fromkeys(group.parts.keepers, 0)  # that their engines have made
        self._told = dict.fromkeys(group.parts.keepers, 0)  # steps, as a rank has counted them since it began
        self.most: Mapping[int, int] | None = None  # they make no more than so many
        self.chosen: deque[int] = deque()  # ranks for the next groups
        self.open: Collection[tuple[int, int, int]] = ()  # (rank, call, part) that nobody takes the answer of yet
        self._epoch = client.epoch  # when ranks answered last
        self._again: deque[RowsAgain] = deque()  # rows that ranks have begun again, and nobody was told of

    def samples(self, rank: int) -> bool:
        """Whether rows run on a rank, as far as is known."""
        return any(self.client.stand_in(at) == rank for _, at, _ in self._unanswered())

    def _unanswered(self) -> Iterator[tuple[StreamedCallOnRanks, int, _Part]]:
        """Yield the parts of calls that are not over, and whose they are."""
        for call in list(self.calls.values()):  # in a replay the driver looks on too
            yield from ((call, rank, part) for rank, part in call.parts.items() if part.answer is None)

    @property
    def has_results(self) -> bool:
        """Whether a call is over, and its result is not taken yet: it goes first."""
        return any(call.has_answers for call in self.calls.values())

    def choose_rank(self) -> int:
        """Return the rank for a group: the one that was chosen, or else the one that samples the fewest."""
        while self.chosen:
            if (rank := self.chosen.popleft()) in self.group.parts.keepers:
                return rank
        busy = dict.fromkeys(self.group.parts.keepers, 0)
        for _, rank, _ in self._unanswered():
            busy[self.client.stand_in(rank)] += 1
        return min(busy, key=lambda rank: (busy[rank], rank))

    def _forget_steps(self) -> None:
        """Count the steps of ranks from 0 that were restarted since they answered last."""
        for rank in self._told:
            if self.client.restarted_after(self._epoch, rank):
                self._told[rank] = 0
        self._epoch = self.client.epoch

    def _steps_left(self, rank: int) -> int | None:
        """Return how many steps the engine of a rank may make; None: as many as it likes."""
        most = None if self.most is None else self.most.get(rank)
        return None if most is None else max(0, most - self.steps.get(rank, 0))

    def take_again(self) -> list[RowsAgain]:
        """Return which rows ranks have begun again since they were asked for last."""
        return [self._again.popleft() for _ in range(len(self._again))]

    def begin_rows_again(self, again: RowsAgain) -> None:
        """Have a rank begin rows again that it has, from the first of their tokens. Raises RankLost."""
        parts: dict[int, _Part] = {}
        wanted: dict[int, KeptTokens] = {}
        known = {(kept.call, kept.part): kept for kept in again.kept}
        for call, rank, part in self._unanswered():
            if rank == again.rank and (kept := known.get((call.call.index, call.part))) is not None:
                parts[part.number], wanted[part.number] = part, kept
        words = dict.fromkeys(self.group.parts.team_of(again.rank), (self.group.key, wanted))
        asked = self.client.send("begin_again", words)
        what = "rows that begin again as they did in the run"
        for number, told in self.client.wait(asked, what)[again.rank].items():
            parts[number].heard, parts[number].entered = HeardTokens.of(told), False
        self._again.append(again)

    def advance(self, what: str) -> None:
        """Have the ranks sample for a short time. Raises RankLost."""
        self._forget_steps()
        self._begin_again()
        asked: dict[int, dict[int, int]] = {}
        parts: dict[int, tuple[StreamedCallOnRanks, int, _Part]] = {}
        for call, rank, part in self._unanswered():
            parts[part.number] = call, rank, part
            asked.setdefault(self.client.stand_in(rank), {})[part.number] = part.heard.last
        words = {
            one: (self.group.key, asked[rank], self._steps_left(rank))
            for rank in sorted(asked)
            for one in self.group.parts.team_of(rank)
        }
        answers: dict[int, Advanced] = self.client.wait(self.client.send("advance", words), what)
        found = {rank: self._together(rank, answers, parts) for rank in asked}
        copies: list[Callable[[], None]] = []  # all of them come beside each other
        lost: dict[int, Failed] = {}  # whose rows go on once they are there again
        for rank, advanced in found.items():
            self.steps[rank] = self.steps.get(rank, 0) + advanced.steps - self._told.get(rank, 0)
            self._told[rank] = advanced.steps
            for number in advanced.entered:
                parts[number][2].entered = True
            for number, told in advanced.told.items():
                self.client.traffic.add(told=parts[number][2].heard.take(told))
            for number, answer in advanced.over.items():
                call, of, _ = parts[number]
                if self.open and (of, call.call.index, call.part) in self.open:
                    continue  # these rows are begun again
                if isinstance(answer, Failed) and isinstance(answer.error, EngineLost):
                    lost[rank] = answer
                else:
                    copies += self._take(*parts[number][:2], answer)
        for wait in copies:
            wait()
        self.client.raise_lost_engines(lost, what)

    def _together(
        self, rank: int, answers: Mapping[int, Advanced], parts: Mapping[int, tuple[StreamedCallOnRanks, int, _Part]]
    ) -> Advanced:
        """Return what a rank has answered; a call that has failed on one beside it has failed. ``parts``: those that
        are asked for, by number."""
        mine, team = answers[rank], self.group.parts.team_of(rank)
        if team == (rank,):
            return mine
        over = dict(mine.over)
        for other in team:
            for number, answer in answers[other].over.items() if other != rank else ():
                if isinstance(answer, Reply):
                    beside = parts[number][2].beside  # which may have the name of one that is gone
                    beside[next((r for r in beside if self.client.stand_in(r) == other), other)] = answer
                elif not isinstance(known := over.get(number), Failed) or known.elsewhere:
                    over[number] = answer
        return replace(mine, over=over)

    def _take(self, call: StreamedCallOnRanks, rank: int, answer: Reply | Failed) -> list[Callable[[], None]]:
        part = call.parts[rank]
        if isinstance(answer, Failed) and answer.before and self.client.restarted_since(part.epoch):
            part.epoch = -1  # its rows were on a rank that is there again
            return []
        return call.keep(rank, answer)

    def _begin_again(self) -> None:
        """Tell ranks that were restarted of the calls that they were at, and of the tokens that are known of them."""
        unfinished: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        kept_by: dict[int, list[KeptTokens]] = defaultdict(list)  # rank
        with self.client.order:
            for call, rank, part in self._unanswered():
                if part.epoch < 0 or self.client.restarted_after(part.epoch, rank):
                    weights = (self.group.version, self.group.dirty)
                    keep = self.client.new_id() if part.rank_call.keep else 0  # what had the old one is gone
                    kept = part.heard.hand_on()
                    kept_by[rank].append(_kept_tokens(call, part, kept))
                    part.rank_call = replace(part.rank_call, weights=weights, keep=keep, frees=(), kept=kept)
                    remake_rows(self.client, [dict(part.rank_call.arguments)])
                    part.was_answered, part.beside = False, dict.fromkeys(part.beside)
                    part.epoch, part.entered = self.client.epoch, False
                    asked = part.asked(rank)
                    self.client.send("begin", {one: (part.number, told) for one, told in asked.items()})
                    unfinished[call.call.title, call.call.info.step, self.client.stand_in(rank)] += (
                        part.heard.unfinished
                    )
        for rank, found in kept_by.items():
            self._again.append(RowsAgain(rank, self.steps.get(rank, 0), tuple(found)))
        for (title, step, rank), tokens in unfinished.items():
            if tokens:
                rows = "1 row goes" if len(tokens) == 1 else f"{len(tokens)} rows go"
                what = f"{rows} on from {sum(tokens)} kept tokens"
                self.on_kept(f"{what}: {title} of step {step} on rank {rank}")


def _kept_tokens(call: StreamedCallOnRanks, part: _Part, kept: ToldTokens | None) -> KeptTokens:
    """Return how much is known of a part that begins again."""
    tokens = {} if kept is None else {row.row: len(row.ids) + (row.reason != "aborted") for row in kept}
    through = kept is not None and kept.kept_cache
    return KeptTokens(call.call.index, call.part, tokens, through, apart=part.was_answered or part.epoch < 0)
