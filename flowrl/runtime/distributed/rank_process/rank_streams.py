"""The calls of a rank whose rows leave its engine one by one: in one batch, for a short time whenever it is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from ....errors import EngineLost
from ....graph.ops.op import Op
from ....schedule.events import KeptTokens
from ....workers.base import Worker
from ....workers.model_worker import ModelWorker
from ....workers.streaming import SampledRow, streams
from ....workers.user_code.rows_in_progress import Notes
from ...local.shared_engine import NOTHING, KeptRows, Rows, SharedEngine, StreamedCall
from ..protocol import Advanced, Failed, RankCall, Reply
from ..told_tokens import ToldTokens

#: Seconds for which a rank samples before it answers: a publish, or a new call, waits no longer than that.
SLICE = 0.05
#: Seconds from one time that tokens are told to the next, at least, and how often the time that it took itself.
TOLD_EVERY, TOLD_TIMES = 0.25, 50
#: Bytes of tokens that are told of a call while it runs. Those behind them are sampled again where the rank is lost.
MOST_TOLD = 1 << 25

Key = tuple[str, bool]


@dataclass
class _Begun:
    """A call that samples."""

    call: RankCall
    streamed: StreamedCall
    reply: Callable[[Any], Reply]
    teller: Teller
    begin: Callable[[RankCall], None] = lambda call: None  # the same call once more, as the last one
    entered: bool = False
    warnings: list[str] = field(default_factory=list[str])


class Teller:
    """What the driver is told of the rows of a call while they run: each token in one message, until it knows that.

    ``kept`` it knows already. ``known`` are tokens of each row that were told; of one that has ended one more.
    """

    def __init__(self, kept: KeptRows) -> None:
        self.known: dict[int, int] = {}
        self._messages: deque[ToldTokens] = deque()  # that it may not have heard
        self._number = self._bytes = 0
        self._note(kept)

    @property
    def is_full(self) -> bool:
        """Whether so much was told that no more is."""
        return self._bytes >= MOST_TOLD

    def add(self, found: KeptRows) -> None:
        """Have these tokens told."""
        self._note(found)
        self._number += 1
        self._messages.append(message := ToldTokens.of(found, self._number))
        self._bytes += message.bytes

    def tell(self, heard: int) -> tuple[ToldTokens, ...]:
        """Return what the driver has not heard, of which message ``heard`` was the last one."""
        while self._messages and self._messages[0].number <= heard:
            self._messages.popleft()
        return tuple(self._messages)

    def _note(self, told: KeptRows) -> None:
        for row in told.rows:
            self.known[row.row] = self.known.get(row.row, 0) + len(row.ids) + (row.reason != "aborted")


class RankStreams:
    """The engines of a rank that calls share, by worker. The lane of the rank's work alone uses it."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._shared: dict[Key, SharedEngine] = {}
        self._begun: dict[Key, dict[int, _Begun]] = {}
        self._over: dict[Key, dict[int, Reply | Failed]] = {}  # what came of those that are over, while it is asked for
        self._ended: dict[Key, dict[int, _Begun]] = {}  # the same calls
        self._tell_at: dict[Key, float] = {}  # when tokens are told next

    def share(self, key: Key, worker: Worker) -> SharedEngine:
        """Return the engine of a worker, which counts versions from here on."""
        if key not in self._shared:
            assert isinstance(worker, ModelWorker), "a model samples"
            engine = worker.engine
            assert streams(engine), "rows of this engine leave one by one"
            self._shared[key] = SharedEngine(engine, worker.version)
        return self._shared[key]

    def begin(
        self,
        number: int,
        call: RankCall,
        op: Op,
        worker: Worker,
        arguments: Mapping[str, Any],
        reply: Callable[[Any], Reply],
    ) -> None:
        """Have the rows of a call join the batch. ``reply`` makes the answer of what the op gives."""
        assert call.worker is not None, "a worker samples"
        shared = self.share(call.worker, worker)
        self._over.get(call.worker, {}).pop(number, None)
        warnings: list[str] = []
        kept = NOTHING if call.kept is None else KeptRows(tuple(call.kept), call.kept.kept_cache)
        how: Any = {"engine": shared, "notes": self._notes, "warn": warnings.append, "kept": kept}
        try:
            streamed = StreamedCall(op, worker, arguments, call.into, call.info, **how)
        except EngineLost as error:
            shared.give_up(error)  # the others may wait for it in the midst of a publish: it asks nobody
            raise
        except BaseException:
            shared.any_rank(True)
            raise
        if shared.any_rank(False):
            streamed.withdraw()
            self.fail(number, call.worker, Failed(None, "another rank could not begin it", "", elsewhere=True))
            return

        def again(call: RankCall) -> None:
            self.begin(number, call, op, worker, arguments, reply)

        begun = _Begun(call, streamed, reply, Teller(kept), again, warnings=warnings)
        self._begun.setdefault(call.worker, {})[number] = begun

    def begin_again(self, key: Key, wanted: Mapping[int, KeptTokens], version: int) -> dict[int, ToldTokens]:
        """Begin calls again from some of the tokens that their rows have, which are returned, as if the rank had been
        lost; ``version`` is that of its weights."""
        shared = self._shared[key]
        there = {**self._ended.get(key, {}), **self._begun.get(key, {})}
        old = {number: there[number] for number in wanted if number in there}
        found: dict[int, list[SampledRow]] = {}
        for number, each in old.items():
            found[number] = each.streamed.withdraw()
            for known in (self._begun, self._ended, self._over):
                known.get(key, {}).pop(number, None)
        shared.pause()
        shared.resume(version, keep_cache=False)
        told: dict[int, ToldTokens] = {}
        for number, each in old.items():
            rows = _as_known(found[number], wanted[number])
            told[number] = ToldTokens.of(KeptRows(rows, wanted[number].kept_cache))
            each.begin(replace(each.call, kept=told[number] if wanted[number].tokens else None))
        return told

    def fail(self, number: int, key: Key, failed: Failed) -> None:
        """Keep why a call could not begin, for the next :meth:`advance`."""
        self._over.setdefault(key, {})[number] = failed

    def advance(self, key: Key, wanted: Mapping[int, int], most: int | None = None) -> Advanced:
        """Sample for a short time, or until something has come of it; with ``most`` for so many steps and no less.

        ``wanted``: the calls whose answers nobody has yet, with the number of the last message of tokens that was heard
        of each; of others answers are forgotten. Ranks that have the engine together make as many steps: the first one
        that stops stops all. Raises what such an engine fails with.
        """
        over = self._over[key] = {n: answer for n, answer in self._over.get(key, {}).items() if n in wanted}
        ended = self._ended[key] = {n: each for n, each in self._ended.get(key, {}).items() if n in wanted}
        shared = self._shared.get(key)
        if shared is not None:
            shared.raise_failure()
            shared.most = None if most is None else shared.steps + most
        begun, ends = self._begun.get(key, {}), perf_counter() + SLICE
        before, news = set(over), False  # what was answered before, and is still wanted
        stops = not begun
        while shared is not None and not shared.any_rank(stops):
            for number, each in list(begun.items()):
                try:
                    if each.streamed.step():
                        over[number] = each.reply(each.streamed.result())
                except BaseException as error:
                    over[number] = Failed.of(error)
                if number in over:
                    ended[number] = begun.pop(number)
                    if isinstance(found := over[number], Reply):
                        found.warnings = (*each.warnings, *found.warnings)
                elif not each.entered and each.streamed.has_entered:
                    each.entered = news = True
            shared.raise_failure()
            stops = news or not over.keys() <= before or not begun or shared.is_held or perf_counter() >= ends
        entered = tuple(number for number, each in begun.items() if each.entered)
        if shared is not None and (now := perf_counter()) >= self._tell_at.get(key, 0.0):
            _collect_told(shared, [each for each in begun.values() if each.call.keep])  # of others another rank tells
            self._tell_at[key] = perf_counter() + max(TOLD_EVERY, TOLD_TIMES * (perf_counter() - now))
        told = {n: found for n, each in begun.items() if (found := each.teller.tell(wanted.get(n, 0)))}
        return Advanced(dict(over), entered, 0 if shared is None else shared.steps, told)

    def pause(self, key: Key) -> None:
        """Stop between two tokens: weights are about to be written."""
        if key in self._shared:
            self._shared[key].pause()

    def resume(self, key: Key, version: int, *, keep_cache: bool) -> None:
        """Go on under the weights of a version."""
        if key in self._shared:
            self._shared[key].resume(version, keep_cache=keep_cache)

    def forget(self) -> None:
        """End all rows: the run begins anew, or goes back to a checkpoint."""
        for shared in self._shared.values():
            shared.abort()
        self._shared.clear()
        self._begun.clear()
        self._over.clear()
        self._ended.clear()


def _as_known(rows: Iterable[SampledRow], kept: KeptTokens) -> tuple[SampledRow, ...]:
    """Return rows as they were when so much was known of them."""
    known = ((row, kept.tokens.get(row.row, 0)) for row in rows)
    return tuple(row if count > len(row.ids) else row.until(count) for row, count in known if count)


def _collect_told(shared: SharedEngine, begun: Iterable[_Begun]) -> None:
    """Have the tellers of calls take what their rows have got since they were asked for last."""
    tellers: dict[Rows, Teller] = {}
    for each in begun:
        if (rows := each.streamed.first_rows) is not None and not each.teller.is_full:
            tellers[rows] = each.teller
    for rows, found in shared.tokens_since({rows: teller.known for rows, teller in tellers.items()}).items():
        if found:
            tellers[rows].add(KeptRows(tuple(found), rows.kept_cache))
