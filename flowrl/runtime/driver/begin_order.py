"""In which order pools that sample begin with calls and publishes, and how far their engines were by then: noted as a
run goes, and kept to in a replay."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...schedule.events import AGAIN, PUBLISH, STAGE, Begun, Command, Commit, GoOn, Publish, Stage, Start, Take
from ...schedule.scheme import Scheme
from ..executor import Executor, RowsAgain

_MOMENT = 0.001  # seconds from one look at an engine that is not there yet to the next

_Steps = Mapping[int, int]  # by rank: steps that the engines of a pool have made


class BeginOrder:
    """Counts the steps of the engines between two starts in each pool that samples. With ``setup.begun`` of an earlier
    run, a start waits until its engines have made as many, and they wait for the start."""

    def __init__(self, scheme: Scheme, executor: Executor) -> None:
        setup = scheme.setup
        self._pools = {
            pool: _PoolOrder(pool, workers, [each for each in setup.begun if each.pool == pool], executor)
            for pool, workers in setup.sampling_pools.items()
        }
        self._executor = executor
        self._taken: dict[int, tuple[tuple[int, int], ...]] = {}
        self._groups = bool(setup.taken)

    def hand_out(self, command: Command) -> None:
        """Note a command of the machine, in its order."""
        if isinstance(command, Take):
            self._taken[command.id] = command.groups
        elif not isinstance(command, (Commit, GoOn)):
            for pool in self._of(command):
                pool.hand_out(command)

    def may_begin(self, command: Start | Stage | Publish) -> bool:
        """Whether the engines are where they were in the earlier run; has them wait there."""
        if all(pool.may_begin(command) for pool in self._of(command)):
            return True
        time.sleep(_MOMENT)
        return False

    def choose_ranks(self, command: Start) -> None:
        """Have the groups of a call go to the ranks that had them in the earlier run."""
        for pool in self._of(command):
            if ranks := pool.ranks_of(command):
                self._executor.choose_ranks(next(iter(command.versions)), ranks)

    def begin(self, command: Start | Stage | Publish, ranks: tuple[int, ...] = ()) -> None:
        """Note that a command has begun: how many steps the engines have made since the one before."""
        for pool in self._of(command):
            pool.begin(command, ranks)

    def begin_rows_again(self, pools: Iterable[str]) -> None:
        """In a replay: have ranks begin rows again where they did in the earlier run, as they had been lost there."""
        for pool in pools:
            if pool in self._pools:
                self._pools[pool].begin_rows_again()

    def stands_still(self) -> bool:
        """Whether every engine that has rows waits for a start: it has made as many steps as in the earlier run."""
        run = [pool for pool in self._pools.values() if pool.runs()]
        return bool(run) and all(pool.stands_still() for pool in run)

    def go_on(self) -> None:
        """Have engines go on until the next start, though it comes later than in the earlier run."""
        for pool in self._pools.values():
            pool.go_on()

    @property
    def is_kept(self) -> bool:
        """Whether the order is that of an earlier run."""
        return self._groups or any(pool.is_kept for pool in self._pools.values())

    def free(self) -> None:
        """Keep the order of the earlier run no longer: nothing waits for what may never be issued."""
        self._groups = False
        for pool in self._pools.values():
            pool.free()

    def take_notes(self) -> tuple[list[Begun], dict[int, Any]]:
        """Return what has begun since the last time, and the groups that calls have got; once."""
        begun = [each for pool in self._pools.values() for each in pool.take_notes()]
        taken, self._taken = self._taken, {}
        return begun, dict(taken)

    def _of(self, command: Start | Stage | Publish) -> list[_PoolOrder]:
        return [self._pools[pool] for pool in command.pools if pool in self._pools]


@dataclass(slots=True)
class _Noted:
    """What was handed to the pool's thread; as it was once it has begun."""

    key: tuple[int, int, str]
    begun: Begun | None = None


class _PoolOrder:
    """The order of one pool. Calls of different workers are never in it side by side, so that it has one count of
    steps: that of all its engines together."""

    def __init__(self, pool: str, workers: Sequence[str], known: Sequence[Begun], executor: Executor) -> None:
        self._pool, self._workers, self._executor = pool, workers, executor
        self._noted: deque[_Noted] = deque()
        starts = [each for each in known if each.number != AGAIN]
        self._known = {each.key: each for each in starts}
        self._following = {a.key: b for a, b in pairwise(starts)}
        self._again = dict(_with_those_before(known))  # by start: the rows that begin again before the next one
        again = ((each.part, kept) for each in known if each.number == AGAIN for kept in each.kept)
        self._open = Counter((rank, kept.call, kept.part) for rank, kept in again)  # how often they are to begin again
        self._left: deque[Begun] = deque()  # of these, those that are still to come now
        self._next: Begun | None = None  # the start that comes next
        self._base: _Steps | None = None  # when the last start began; None before the first one
        self._ends: _Steps | None = None  # steps that the engines may make until something begins

    def hand_out(self, command: Start | Stage | Publish) -> None:
        self._noted.append(_Noted(_key(command)))

    def may_begin(self, command: Start | Stage | Publish) -> bool:
        key = _key(command)
        known = self._known.get(key)
        if known is None:
            return True
        if next(each.key for each in self._noted if each.begun is None) != key:
            return False  # what was handed out before it has not had its turn yet
        running = self._running()
        if self._left and running:
            return False
        if known.after is None:
            return not running
        made, base = self._steps(), self._base or {}
        return all(made.get(rank, 0) >= base.get(rank, 0) + known.after.get(rank, 0) for rank in running)

    def ranks_of(self, command: Start) -> tuple[int, ...]:
        known = self._known.get(_key(command))
        return () if known is None else known.ranks

    def begin(self, command: Start | Stage | Publish, ranks: tuple[int, ...]) -> None:
        key, steps = _key(command), self._steps()
        self._note_again()
        noted = next(each for each in self._noted if each.key == key)
        after = None if self._base is None else self._since_base(steps)
        noted.begun = Begun(self._pool, key[0], key[1], after, ranks, key[2])
        self._base = steps
        if self._known:
            self._left = deque(self._again.get(key, ()))
            self._next = self._following.get(key)
            self._hold()

    def begin_rows_again(self) -> None:
        while self._left:
            due = self._left[0]
            made, base = self._steps(), self._base or {}
            wanted = {rank: base.get(rank, 0) + count for rank, count in (due.after or {}).items()}
            if any(made.get(rank, 0) < count for rank, count in wanted.items()):
                return
            self._left.popleft()
            self._open.subtract((due.part, kept.call, kept.part) for kept in due.kept)
            self._executor.begin_rows_again(due.worker, RowsAgain(due.part, made.get(due.part, 0), due.kept))
            self._hold()

    def runs(self) -> bool:
        return bool(self._running())

    def stands_still(self) -> bool:
        if self._ends is None:
            return False
        made = self._steps()
        return all(made.get(rank, 0) >= self._ends[rank] for rank in self._running() if rank in self._ends)

    def go_on(self) -> None:
        self._ends = None
        self._tell()

    @property
    def is_kept(self) -> bool:
        return bool(self._known)

    def free(self) -> None:
        self._known, self._following, self._again, self._left, self._next = {}, {}, {}, deque(), None
        self._open.clear()
        self.go_on()

    def take_notes(self) -> list[Begun]:
        self._note_again()
        found: list[Begun] = []
        while self._noted and (begun := self._noted[0].begun) is not None:
            found.append(begun)
            self._noted.popleft()
        return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Have each engine stop where the next start begins, or before that where its rank begins rows again."""
        if self._next is None or self._next.after is None:
            ends: dict[int, int] | None = None
        else:
            base, after = self._base or {}, self._next.after
            ends = {rank: base.get(rank, 0) + after.get(rank, 0) for rank in self._steps()}
        for due in reversed(self._left):
            for rank, count in (due.after or {}).items():
                ends = {**(ends or {}), rank: (self._base or {}).get(rank, 0) + count}
        self._ends = ends
        self._tell()

    def _tell(self) -> None:
        """Have engines make no more steps than they may: what is left for a rank is left for each of its engines."""
        made = self._steps()
        for worker in self._workers:
            own = {rank: steps for rank, (steps, _) in self._executor.engine_steps(worker).items()}
            most = (
                None if self._ends is None else {r: own.get(r, 0) + n - made.get(r, 0) for r, n in self._ends.items()}
            )
            self._executor.hold_engines(worker, most)
            self._executor.keep_open(worker, {part for part, times in self._open.items() if times > 0})

    def _note_again(self) -> None:
        """Note rows that ranks have begun again since the last start."""
        for worker in self._workers:
            for again in self._executor.rows_begun_again(worker):
                count = again.steps - (self._base or {}).get(again.rank, 0)
                begun = Begun(self._pool, AGAIN, again.rank, {again.rank: count}, (), worker, again.kept)
                place = sum(each.begun is not None for each in self._noted)
                self._noted.insert(place, _Noted(begun.key, begun))

    def _since_base(self, steps: _Steps) -> dict[int, int]:
        base = self._base or {}
        return {rank: made - base.get(rank, 0) for rank, made in steps.items() if made > base.get(rank, 0)}

    def _steps(self) -> Counter[int]:
        found = Counter[int]()
        for worker in self._workers:
            found.update({rank: steps for rank, (steps, _) in self._executor.engine_steps(worker).items()})
        return found

    def _running(self) -> list[int]:
        """The ranks whose engines have rows."""
        engines = (self._executor.engine_steps(worker) for worker in self._workers)
        return [rank for each in engines for rank, (_, runs) in each.items() if runs]


def _with_those_before(known: Sequence[Begun]) -> Iterator[tuple[tuple[int, int, str], list[Begun]]]:
    """Yield what begins again between a start and the next one, by the key of the start."""
    last: tuple[int, int, str] | None = None
    again: list[Begun] = []
    for each in known:
        if each.number == AGAIN:
            again.append(each)
        else:
            if last is not None and again:
                yield last, again
            last, again = each.key, []
    if last is not None and again:
        yield last, again


def _key(command: Start | Stage | Publish) -> tuple[int, int, str]:
    if isinstance(command, Start):
        return command.id, command.chunk, ""
    return (PUBLISH if isinstance(command, Publish) else STAGE), command.version, command.worker
