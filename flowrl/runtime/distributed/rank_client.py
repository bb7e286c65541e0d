"""How the driver calls ranks: in one order, waiting for all, and again after ranks that were lost are restarted."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from ...errors import At, DiskError, EngineLost, FlowError, RankLost, RunError, WrongAnswer
from ...workers.headway import Headway
from ...workers.user_code.failed_rewards import Failures
from ..storage.checkpoints.snapshot import Captured
from ..storage.disk import Checksum
from ..transfer.plan_moves import Moves
from ..values.process_memory import ProcessMemory
from .calls.lineage import Lineage
from .expected_lengths import ExpectedLengths
from .protocol import Failed
from .weight_routes import Routes

R = TypeVar("R")


class Link(Protocol):
    """How the driver reaches ranks: ``send`` begins a call, ``wait`` gives the answers by rank.

    ``wait`` raises RankLost for a rank that died or has not answered ``deadline`` seconds after its call began. It
    calls ``on_death`` as soon as one has died and others still work: they may wait for it. ``where``: by rank its pool,
    its process and its machine, as ``node``. ``headway``: how far each has come that answers at once.
    """

    @property
    def where(self) -> Mapping[int, Mapping[str, Any]]: ...

    def send(self, rank: int, method: str, *args: Any) -> Any: ...
    def wait(
        self,
        begun: Mapping[int, Any],
        what: str,
        deadline: float | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> dict[int, Any]: ...
    def headway(self) -> Mapping[int, Headway]: ...


@dataclass
class Traffic:
    """Bytes of columns: ``drawn`` by the driver from data and sent to ranks, ``between`` ranks, and what else the
    driver had: ``records`` for a reader of the run, ``told``, tokens of rows that run, which it hands on where a rank
    is lost, and ``payload``, which stays 0."""

    drawn: int = 0
    between: int = 0
    records: int = 0
    told: int = 0
    payload: int = 0
    _adding: ClassVar[threading.Lock] = threading.Lock()  # pools wait for their calls in threads of their own

    def add(self, *, drawn: int = 0, between: int = 0, records: int = 0, told: int = 0, payload: int = 0) -> None:
        """Count more bytes."""
        with self._adding:
            self.drawn += drawn
            self.between += between
            self.records += records
            self.told += told
            self.payload += payload


@dataclass(frozen=True)
class Asked:
    """What ranks were asked: ``Asked("actor.update of step 3", (0, 1), since=1764000000.0)``.

    ``deadline``: the seconds that they may take.
    """

    what: str
    ranks: tuple[int, ...]
    since: float
    deadline: float | None = None


class RankClient:
    """Calls the ranks of a run. ``pools`` gives the ranks of each pool; ``deadline`` the seconds that a call may take,
    ``staleness`` and
    ``copies`` are the plan's.

    ``restart`` starts lost ranks again with the state that they had, and returns them; it raises RankLost where that
    cannot be. Every such restart begins a new ``epoch``.
    """

    def __init__(
        self,
        link: Link,
        pools: Mapping[str, Sequence[int]],
        *,
        deadline: float | None = None,
        staleness: int = 0,
        copies: int = 1,
    ) -> None:
        self.link, self.deadline = link, deadline
        self.pools: dict[str, tuple[int, ...]] = {pool: tuple(ranks) for pool, ranks in pools.items()}
        self.traffic = Traffic()
        self.warn: Callable[[str], None] = lambda text: None
        self.settle: Callable[[Failures], None] = lambda found: None  # takes the rows that failed in a call
        self.moves: deque[dict[str, Any]] = deque(maxlen=100)  # the latest publishes, for the run's record
        self.swaps: deque[dict[str, Any]] = deque(maxlen=100)  # the latest workers that left a memory or came back
        self.routes = Routes(self)
        self.order = threading.RLock()  # who holds it begins calls; while ranks are restarted nobody else does
        self.lineage = Lineage()
        self.expected = ExpectedLengths(staleness)
        self.journal_since: Mapping[str, int] = {}  # the parts from which on journals have answers of calls to come
        self.copies = copies
        self.memory: dict[int, ProcessMemory] = {}  # by rank: what it had when it answered last
        self.restart: Callable[[RankLost], Collection[int]] = _refuse
        self._ids, self._turns, self._waits = itertools.count(1), itertools.count(1), itertools.count()
        self._asked: dict[int, Asked] = {}  # what threads wait for
        self._dropped: dict[int, deque[int]] = defaultdict(deque)
        self._restarted: dict[int, int] = {}  # by rank: the epoch that its last restart began
        self._torn: RankLost | None = None  # why a restart has not come to its end; the run goes back
        self._epoch = 0
        self._stand_ins: dict[int, int] = {}  # of ranks that are gone for good: who has taken over what they had

    # -- calls ------------------------------------------------------------------------------------------------------

    def call_all(self, ranks: Sequence[int], method: str, *args: Any, what: str = "") -> dict[int, Any]:
        """Make the same call on several ranks. Returns their answers; raises what failed first."""
        return self.wait(self.send(method, dict.fromkeys(ranks, args)), what or method.replace("_", " "))

    def send(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Begin a call on several ranks. Calls in which ranks wait for each other come to all of them in one order."""
        with self.order:
            return {rank: self.link.send(self.stand_in(rank), method, *args) for rank, args in calls.items()}

    def wait(self, sent: Mapping[int, Any], what: str, on_death: Callable[[], None] | None = None) -> dict[int, Any]:
        """Wait for calls that were sent. Returns the answers; raises what failed first."""
        answers = self.wait_for(sent, what, on_death)
        failed = [(rank, a) for rank, a in sorted(answers.items()) if isinstance(a, Failed)]
        if failed:
            rank, first = failed[0]
            raise to_error(first, what, rank, self.pool_of(rank), None, len(failed) - 1)
        return answers

    def wait_for(
        self, sent: Mapping[int, Any], what: str, on_death: Callable[[], None] | None = None
    ) -> dict[int, Any]:
        """Wait for calls that were sent. Returns the answers, those that are failures too."""
        with self.asking(what, sent, self.deadline):
            answers = self._wait_for(sent, what, on_death)
        self.raise_lost_engines(answers, what)
        return answers

    @contextmanager
    def asking(self, what: str, ranks: Iterable[int], deadline: float | None) -> Iterator[None]:
        """Ranks are waited for inside the block, of which other threads are told."""
        number = next(self._waits)
        self._asked[number] = Asked(what, tuple(ranks), time.time(), deadline)
        try:
            yield
        finally:
            del self._asked[number]

    def raise_lost_engines(self, answers: Mapping[int, Any], what: str) -> None:
        """Raise RankLost for ranks that answer that the process behind their engine is gone, or that of a policy which
        they asked."""
        failed = {rank: answer.error for rank, answer in answers.items() if isinstance(answer, Failed)}
        engines = {rank: error for rank, error in failed.items() if isinstance(error, EngineLost)}
        lost = {self.stand_in(rank if e.rank is None else e.rank): e for rank, e in engines.items()}
        if lost:
            rank, error = min(lost.items())
            where = f"rank {rank} of pool '{self.pool_of(rank)}'"
            others = {each: answer for each, answer in answers.items() if self.stand_in(each) not in lost}
            what = f"{where} has lost its engine during {what}: {error.what}"
            raise RankLost(what, ranks=lost, answers=others) from error

    def _wait_for(self, sent: Mapping[int, Any], what: str, on_death: Callable[[], None] | None) -> dict[int, Any]:
        """Return the answers, also of ranks that stand in for those that were asked."""
        if not self._stand_ins or self._stand_ins.keys().isdisjoint(sent):
            return self.link.wait(sent, what, self.deadline, on_death)
        answers: dict[int, Any] = {}
        left = dict(sent)
        while left:  # a rank has one name in each wait
            asked = {self.stand_in(rank): rank for rank in reversed(left)}
            try:
                found = self.link.wait(
                    {here: left[rank] for here, rank in asked.items()}, what, self.deadline, on_death
                )
            except RankLost as lost:
                lost.answers = answers | {asked[here]: a for here, a in lost.answers.items() if here in asked}
                raise
            answers |= {asked[here]: answer for here, answer in found.items()}
            left = {rank: begun for rank, begun in left.items() if rank not in answers}
        return {rank: answers[rank] for rank in sent}

    def asked(self) -> list[Asked]:
        """Return what is waited for now, in any thread."""
        return [asked for _, asked in sorted(dict(self._asked).items())]

    def pool_of(self, rank: int) -> str:
        """Return the pool of a rank."""
        return next((p for p, ranks in self.pools.items() if rank in ranks), "")

    def next_rank(self) -> int:
        """Return a rank, another one each time: for a call that may run on any."""
        ranks = self.all_ranks
        return ranks[next(self._turns) % len(ranks)]

    @property
    def all_ranks(self) -> list[int]:
        """All ranks of the run."""
        return [rank for ranks in self.pools.values() for rank in ranks]

    # -- ranks that are lost, and restarted -------------------------------------------------------------------------

    def retry(self, action: Callable[[], R], epoch: int | None = None) -> R:
        """Return what an action gives; do it again when ranks are lost meanwhile that can be restarted as they were.

        ``epoch``: that in which it was begun the first time. Once a restart has failed in its midst, nothing is done
        until the run goes back: ranks that were started anew know of none of the calls that they would be asked of.
        """
        while True:
            if (torn := self._torn) is not None:
                raise RankLost(torn.what, ranks=torn.ranks, inconsistent=True) from torn
            epoch = self._epoch if epoch is None else epoch
            try:
                return action()
            except RankLost as lost:
                self.restart_lost(lost, epoch)
                epoch = None

    def restart_lost(self, lost: RankLost, epoch: int) -> None:
        """Restart the ranks that were lost, unless somebody has done so after ``epoch``.

        Raises ``lost`` where they cannot have the state that they had.
        """
        if lost.inconsistent:
            raise lost
        with self.order:
            if self._epoch == epoch or not all(self.restarted_after(epoch, r) for r in lost.ranks):
                try:
                    restarted = self.restart(lost)
                except RankLost as again:
                    if again.inconsistent:
                        self._torn = again
                    raise
                self._epoch += 1
                self._restarted |= dict.fromkeys(self._with_names(restarted), self._epoch)

    def restarted_after(self, epoch: int, rank: int) -> bool:
        """Whether the rank was restarted after ``epoch``."""
        return self._restarted.get(rank, 0) > epoch

    def restarted_since(self, epoch: int) -> bool:
        """Whether any rank was restarted after ``epoch``; waits for a restart that is under way."""
        with self.order:
            return self._epoch != epoch

    @contextmanager
    def blaming_restarts(self, epoch: int, what: str) -> Iterator[None]:
        """Raise RankLost, which says ``what``, for a failure inside where ranks were restarted after ``epoch``."""
        try:
            yield
        except (RankLost, DiskError):
            raise
        except Exception as error:
            if self.restarted_since(epoch):
                raise RankLost(what) from error
            raise

    @property
    def epoch(self) -> int:
        """How often ranks were restarted within programs."""
        return self._epoch

    def stand_in(self, rank: int) -> int:
        """Return the rank that has taken over from one that is gone for good; the rank itself otherwise."""
        return self._stand_ins.get(rank, rank)

    def take_over(self, stand_ins: Mapping[int, int]) -> None:
        """Have other ranks of their pools stand in for ranks that are gone for good: what is asked of these is asked
        of them, such as rows that a gone one had, which are made again there."""
        for pool, ranks in self.pools.items():
            self.pools[pool] = tuple(rank for rank in ranks if rank not in stand_ins)
        self._stand_ins = {gone: stand_ins.get(rank, rank) for gone, rank in self._stand_ins.items()} | dict(stand_ins)
        for rank in stand_ins:
            self.memory.pop(rank, None)

    def _with_names(self, ranks: Collection[int]) -> list[int]:
        """Return ranks, and those for which they stand in."""
        return [*ranks, *(gone for gone, rank in self._stand_ins.items() if rank in ranks and gone not in ranks)]

    def forget_ranks(self, ranks: Collection[int]) -> None:
        """Forget what ranks held that were started anew, and their connections with others."""
        self.lineage.lose(self._with_names(ranks), self.new_id())
        for rank in ranks:
            self._dropped[rank].clear()
        self.routes.forget_ranks(ranks)

    def forget(self) -> None:
        """Forget all rows and connections: the run goes back to a checkpoint, and makes them again."""
        self.routes.clear()
        self.lineage.forget()
        self._stand_ins.clear()
        self._torn = None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def write_captured(self, id: int, ranks: Sequence[int], epoch: int, what: str, lacking: int = 0) -> Captured:
        """Have ranks begin to write what they have captured in ``epoch``. Returns what waits for it, in any thread.

        It raises RankLost where a rank has been restarted since.
        """
        sent = self.send("write_captured", dict.fromkeys(ranks, (id,)))

        def wait() -> dict[str, Checksum]:
            with self.blaming_restarts(epoch, f"{what} needed ranks that were started again meanwhile."):
                parts = self.wait(sent, what)
            return {name: said for part in parts.values() for name, said in part.items()}

        return Captured(wait, lacking)

    # -- objects ----------------------------------------------------------------------------------------------------

    def new_id(self) -> int:
        """Return a fresh object id."""
        return next(self._ids)

    def drop(self, rank: int, id: int) -> None:
        """Free an object of a rank: it is told so with its next call."""
        if id:
            self._dropped[self.stand_in(rank)].append(id)
            copy = self.lineage.copy_of(id)
            if copy is not None:
                self._dropped[copy].append(id)
            self.lineage.drop(id)

    def take_dropped(self, rank: int) -> tuple[int, ...]:
        """Return the objects that a rank may free now; the caller tells it."""
        dropped, ids = self._dropped[rank], list[int]()
        while dropped:
            ids.append(dropped.popleft())
        return tuple(ids)

    def another_rank(self, rank: int, team: Collection[int] = ()) -> int | None:
        """Return a rank to keep copies of what one holds: on another machine, or else of the same pool, or else any.

        ``team``: those that compute with it, and are lost with it: where there are others, of these.
        """
        rank = self.stand_in(rank)
        node, pool = {at: there["node"] for at, there in list(self.link.where.items())}, self.pool_of(rank)
        others = [other for other in self.all_ranks if other != rank]

        def far(other: int) -> tuple[bool, bool, bool, int]:
            same, mine = node.get(other) == node.get(rank), self.pool_of(other) == pool  # one may go for good meanwhile
            return other in team, same, not mine, (other - rank) % (max(self.all_ranks) + 1)

        return min(others, key=far, default=None)

    def begin_copy(self, id: int, rank: int, other: int, what: str) -> Callable[[], None]:
        """Have another rank keep an object of a rank too. Returns what waits for it, and raises what the copy fails
        with."""
        with self.order:
            epoch, begun = self.epoch, self.send("keep_copy", {other: (rank, id)})

        def wait() -> None:
            self.traffic.add(between=self.wait(begun, what)[other])
            with self.order:  # it may have been started again, once it had answered
                if not self.restarted_after(epoch, other):
                    self.lineage.note_copy(id, other)

        return wait

    # -- records ----------------------------------------------------------------------------------------------------

    def note_move(self, what: str, moves: Moves, answers: Mapping[int, Any]) -> None:
        """Note what a publish moved."""
        received = {rank: m.received for rank, m in answers.items() if m.received}
        peak = max((m.peak_staging for m in answers.values()), default=0)
        self.moves.append({"what": what, "received": received, "total": moves.total, "peak_staging": peak})

    def note_swap(
        self, what: str, pool: str, resident: str, sizes: Mapping[int, int], forecast: float | None = None
    ) -> None:
        """Note the bytes that a worker freed or took on each rank of its pool, and those that its plan foretold."""
        if sizes:
            swap = {"what": what, "pool": pool, "resident": resident, "bytes": dict(sizes)}
            self.swaps.append(swap if forecast is None else {**swap, "forecast": forecast})


def to_error(failed: Failed, title: str, rank: int, pool: str, at: At | None, others: int) -> FlowError:
    """Return what failed on a rank as the user meets it: with the driver's line, and the traceback there as a note."""
    where = f"rank {rank} of pool '{pool}'"
    if failed.error is not None:
        error = failed.error
        error.at = error.at or at
        if isinstance(error, WrongAnswer):
            error.what = f"{title} on {where}: {error.what}"
    else:
        error = RunError(f"{title} failed on {where}: {failed.text}", at=at)
    lines = "\n".join(f"  | {line}" for line in failed.traceback.rstrip().splitlines())
    error.add_note(f"{title} on {where}:\n{lines}")
    if others:
        error.add_note(f"({others} more rank{'s' if others > 1 else ''} of this call failed)")
    return error


def _refuse(lost: RankLost) -> Collection[int]:
    raise lost
