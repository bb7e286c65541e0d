"""All ranks of a run, as the driver reaches them: calls in order, ranks that are renewed, ways for weights."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...errors import At, FlowError, RankLost, RunError
from ..transfer.plan import Moves
from .lineage import Lineage
from .protocol import Failed
from .worker_group import WorkerGroup, present

R = TypeVar("R")


class Link(Protocol):
    """How the driver reaches ranks: ``send`` begins a call, ``wait`` gives the answers by rank.

    ``wait`` raises RankLost for a rank that died or has not answered ``deadline`` seconds after its call began. It
    calls ``on_death`` as soon as one has died and others still work: they may wait for it.
    """

    def send(self, rank: int, method: str, *args: Any) -> Any: ...
    def wait(
        self,
        begun: Mapping[int, Any],
        what: str,
        deadline: float | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> dict[int, Any]: ...


@dataclass
class Traffic:
    """Bytes of columns: ``drawn`` by the driver from data and sent to ranks, ``between`` ranks, and what else the
    driver had: ``records`` for a reader of the run, and ``payload``, which stays 0."""

    drawn: int = 0
    between: int = 0
    records: int = 0
    payload: int = 0


class RankClient:
    """All ranks of a run. ``pools`` gives the ranks of each pool; ``deadline`` the seconds that a call may take."""

    def __init__(self, link: Link, pools: Mapping[str, Sequence[int]], *, deadline: float | None = None) -> None:
        self.link, self.pools, self.deadline = link, {p: tuple(r) for p, r in pools.items()}, deadline
        self.traffic = Traffic()
        self.warn: Callable[[str], None] = lambda text: None
        self.moves: deque[dict[str, Any]] = deque(maxlen=100)  # the latest publishes, for the run's record
        self.swaps: deque[dict[str, Any]] = deque(maxlen=100)  # the latest workers that made way or came back
        self._routes: dict[tuple[Any, ...], tuple[str, Moves, dict[int, int]]] = {}
        self._numbers = itertools.count(1)
        self._dropped: dict[int, deque[int]] = defaultdict(deque)
        self.order = threading.RLock()  # who holds it begins calls; while ranks are started again nobody else does
        self.lineage = Lineage()
        self.renew: Callable[[RankLost], Collection[int]] = _cannot
        self._restarted: dict[int, int] = {}  # by rank: the epoch of its last restart
        self._epoch = 0

    # -- calls ------------------------------------------------------------------------------------------------------

    def everywhere(self, ranks: Sequence[int], method: str, *args: Any, what: str = "") -> dict[int, Any]:
        """The same call on several ranks; their answers. Raises what failed first."""
        return self.answered(self.begin(method, dict.fromkeys(ranks, args)), what or method.replace("_", " "))

    def begin(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Begin a call on several ranks. Calls in which ranks wait for each other come to all of them in one order."""
        with self.order:
            return {rank: self.link.send(rank, method, *args) for rank, args in calls.items()}

    def answered(
        self, begun: Mapping[int, Any], what: str, on_death: Callable[[], None] | None = None
    ) -> dict[int, Any]:
        """Wait for calls that were begun. Raises what failed first."""
        answers = self.link.wait(begun, what, self.deadline, on_death)
        failed = [(rank, a) for rank, a in sorted(answers.items()) if isinstance(a, Failed)]
        if failed:
            rank, first = failed[0]
            raise told(first, what, rank, self.pool_of(rank), None, len(failed) - 1)
        return answers

    def pool_of(self, rank: int) -> str:
        """The pool of a rank."""
        return next((p for p, ranks in self.pools.items() if rank in ranks), "")

    # -- ranks that are lost, and renewed ---------------------------------------------------------------------------

    def lasting(self, action: Callable[[], R], epoch: int | None = None) -> R:
        """Do something; again when ranks are lost meanwhile that can be renewed with all that they held.

        ``epoch``: that in which it was begun the first time.
        """
        while True:
            epoch = self._epoch if epoch is None else epoch
            try:
                return action()
            except RankLost as lost:
                if lost.inconsistent:
                    raise
                with self.order:
                    if self._epoch == epoch or not all(self.restarted_after(epoch, r) for r in lost.ranks):
                        renewed = self.renew(lost)
                        self._epoch += 1
                        self._restarted |= dict.fromkeys(renewed, self._epoch)
                epoch = None

    def restarted_after(self, epoch: int, rank: int) -> bool:
        """Whether the rank was restarted after ``epoch``."""
        return self._restarted.get(rank, 0) > epoch

    def restarted_since(self, epoch: int) -> bool:
        """Whether any rank was restarted after ``epoch``; waits for a restart that is under way."""
        with self.order:
            return self._epoch != epoch

    @property
    def epoch(self) -> int:
        """How often ranks were restarted within programs."""
        return self._epoch

    def bring_back(self, wanted: Any) -> None:
        """Have lost rows that arguments ask for made again, by the same calls. RankLost where that cannot be."""
        for rank, id in self.lineage.missing(wanted):
            made = self.lineage.of(id)
            if made is None or not made.repeatable:
                what = f"rows that rank {rank} held are needed, and cannot be made again."
                raise RankLost(what, ranks=[rank], inconsistent=True, alive=True)
            rank_calls = made.again(id)
            self.bring_back([dict(t.arguments) for t in rank_calls.values()])
            what = f"{made.title} of step {made.step}, once more"
            try:
                with present(*made.stamps):
                    begun = self.begin("run", {r: (t,) for r, t in rank_calls.items()})
                    answers = self.answered(begun, what)
            except RankLost:
                raise
            except Exception as error:  # such as memory that is not there beside others
                raise RankLost(f"{what} failed: {error}", ranks=[rank], inconsistent=True) from error
            for r, reply in answers.items():
                if made.checks.get(rank_calls[r].keep, reply.check) != reply.check:
                    what = f"{made.title} gave other rows when rank {r} made them again."
                    raise RankLost(what, ranks=[r], inconsistent=True, alive=True)
            self.lineage.made_again({t.keep: r for r, t in rank_calls.items()})

    def lose(self, ranks: Collection[int]) -> None:
        """These ranks were started anew: all that they held is gone, and their connections with it."""
        self.lineage.lose(ranks, self.number())
        for rank in ranks:
            self._dropped[rank].clear()
        for ends, (name, _, numbers) in list(self._routes.items()):
            if not set(numbers).isdisjoint(ranks):
                del self._routes[ends]
                self._part(name, [r for r in numbers if r not in ranks])

    # -- objects ----------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """One that nothing else has."""
        return next(self._numbers)

    def drop(self, rank: int, id: int) -> None:
        """Nobody needs an object of a rank any more: it is told so with its next call."""
        if id:
            self._dropped[rank].append(id)
            self.lineage.drop(id)

    def dropped(self, rank: int) -> tuple[int, ...]:
        """The objects that a rank may free now; it has to be told of them."""
        dropped, some = self._dropped[rank], list[int]()
        while dropped:
            some.append(dropped.popleft())
        return tuple(some)

    # -- weights ----------------------------------------------------------------------------------------------------

    def route(self, source: WorkerGroup, target: WorkerGroup) -> tuple[str, Moves, dict[int, int]]:
        """How weights get from one group to another: its name on the ranks, the moves, and who has which number there.

        It is planned, and the ranks are connected, the first time.
        """
        ends = (source.key, source.ranks, target.key, target.ranks)
        if ends not in self._routes:
            ranks = sorted({*source.ranks, *target.ranks})
            numbers = {rank: n for n, rank in enumerate(ranks)}
            moves = target.plan_from(source, numbers)
            name = f"{source.title}-{target.title}.{self.number()}"  # who connects again has another one
            meeting = None
            if moves.total:
                meeting = self.everywhere(ranks[:1], "meeting_point")[ranks[0]]
            seconds = (self.deadline or 240.0) + 60
            ends_of = {rank: (name, moves, n, len(ranks), meeting, seconds) for rank, n in numbers.items()}
            begun = self.begin("connect", ends_of)
            try:
                what = f"connecting {source.title} with {target.title}"
                self.answered(begun, what, lambda: self._part(name, ranks))
            except BaseException:  # some may wait for one that is gone; whoever renews it may wait for them
                self._part(name, ranks)
                raise
            self._routes[ends] = (name, moves, numbers)
        return self._routes[ends]

    def part_ways(self, source: WorkerGroup, target: WorkerGroup) -> None:
        """Forget a route that nobody takes again. Who waits on it for others does so no longer."""
        name, _, numbers = self._routes.pop((source.key, source.ranks, target.key, target.ranks), ("", None, {}))
        self._part(name, numbers)

    def _part(self, name: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.link.send(rank, "disconnect", name)

    def forget(self) -> None:
        """The run goes back to a checkpoint: rows and connections are made again when they are needed."""
        self._routes.clear()
        self.lineage.forget()

    def moved(self, what: str, moves: Moves, answers: Mapping[int, Any]) -> None:
        """Note what a publish moved."""
        received = {rank: m.received for rank, m in answers.items() if m.received}
        peak = max((m.peak_staging for m in answers.values()), default=0)
        self.moves.append({"what": what, "received": received, "total": moves.total, "peak_staging": peak})

    def swapped(
        self, what: str, pool: str, resident: str, sizes: Mapping[int, int], forecast: float | None = None
    ) -> None:
        """Note the bytes that a worker freed or took on each rank of its pool, and those that its plan foretold."""
        if sizes:
            said = {"what": what, "pool": pool, "resident": resident, "bytes": dict(sizes)}
            self.swaps.append(said if forecast is None else {**said, "forecast": forecast})


def told(failed: Failed, title: str, rank: int, pool: str, at: At | None, others: int) -> FlowError:
    """What failed on a rank, as the user meets it: with the driver's line, and the traceback there as a note."""
    where = f"rank {rank} of pool '{pool}'"
    if failed.error is not None:
        error = failed.error
        error.at = error.at or at
    else:
        error = RunError(f"{title} failed on {where}: {failed.text}", at=at)
    lines = "\n".join(f"  | {line}" for line in failed.traceback.rstrip().splitlines())
    error.add_note(f"{title} on {where}:\n{lines}")
    if others:
        error.add_note(f"({others} more rank{'s' if others > 1 else ''} of this call failed)")
    return error


def _cannot(lost: RankLost) -> Collection[int]:
    raise lost
