"""How rows that lie on ranks were made, for as long as their step is open: what it takes to make lost ones again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..values.remote_batch import Fetch, Remote, RemoteColumn, Stored, found
from .protocol import RankCall, Reply

if TYPE_CHECKING:
    from .worker_group import WorkerGroup


@dataclass(eq=False)
class Made:
    """One call: its ``rank_calls`` by rank, and what it ``needs``, which stays where it is for as long as this does.

    ``stamps``: groups, and what their state was. ``together``: its ranks cannot do their part alone.
    """

    title: str
    step: int
    rank_calls: Mapping[int, RankCall]
    stamps: Mapping[WorkerGroup, int]
    together: bool
    needs: tuple[Stored, ...]
    checks: dict[int, str] = field(default_factory=dict[int, str])  # of what each rank has kept, by its number

    @property
    def repeatable(self) -> bool:
        """Whether the workers are what they were."""
        busy = any(g.installing or g.changing or g.swapping for g in self.stamps)
        return not busy and all(g.stamp == stamp for g, stamp in self.stamps.items())

    def again(self, id: int) -> dict[int, RankCall]:
        """The calls that make an object once more."""
        return {r: t for r, t in self.rank_calls.items() if self.together or t.keep == id}


class Lineage:
    """Which call has made which object, and which objects went with the process that held them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, Made] = {}
        self._gone: dict[int, int] = {}  # by rank: objects up to this number are gone
        self._again: dict[int, int] = {}  # but for these: number, and rank
        self._dropped: deque[int] = deque()  # objects are dropped at any time, by whoever forgets the last value

    def note(self, made: Made, answers: Mapping[int, Reply]) -> None:
        """A call is done."""
        with self._lock:
            while self._dropped:
                id = self._dropped.popleft()
                self._made.pop(id, None)
                self._again.pop(id, None)
            for rank, reply in answers.items():
                id = made.rank_calls[rank].keep
                if id and reply.keys is not None:
                    self._made[id] = made
                    made.checks[id] = reply.check

    def of(self, id: int) -> Made | None:
        """The call that made an object; None for one of a step that is committed."""
        return self._made.get(id)

    def drop(self, id: int) -> None:
        """Nobody needs an object any more."""
        self._dropped.append(id)

    def settled(self, step: int) -> None:
        """A step is committed: what it was made of need not be kept."""
        with self._lock:
            for id in [i for i, made in self._made.items() if made.step <= step]:
                del self._made[id]

    def lose(self, ranks: Collection[int], upto: int) -> None:
        """All objects of these ranks so far are gone."""
        with self._lock:
            self._gone |= dict.fromkeys(ranks, upto)
            self._again = {id: rank for id, rank in self._again.items() if rank not in ranks}

    def made_again(self, objects: Mapping[int, int]) -> None:
        """Objects are there again: number, and rank."""
        self._again |= objects

    def missing(self, wanted: Any) -> Iterator[tuple[int, int]]:
        """The objects among those that arguments ask for that are gone, as (rank, number)."""
        if not self._gone:
            return
        for part in (p for f in found(wanted, (Fetch,)) for p in f.parts):
            for take in part.takes:
                if take.id <= self._gone.get(take.rank, -1) and take.id not in self._again:
                    yield take.rank, take.id

    def forget(self) -> None:
        """All objects are gone, and nobody will ask for them."""
        for known in (self._made, self._gone, self._again, self._dropped):
            known.clear()


def needed(arguments: Any) -> tuple[Stored, ...]:
    """The objects behind the values among arguments."""
    kinds = (Remote, RemoteColumn)
    sources = (v.columns.values() if isinstance(v, Remote) else (v.source,) for v in found(arguments, kinds))
    return tuple(dict.fromkeys(s for some in sources for source in some for s in source.stored))
