"""How rows that lie on ranks were made, for as long as their step is open: what it takes to make lost ones again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....graph.stand_ins.argument_trees import find_in
from ...values.remote_batch import Stored, remote_values
from ...values.rows_to_fetch import Fetch
from ..protocol import RankCall, Reply

if TYPE_CHECKING:
    from ..worker_group import WorkerGroup


@dataclass(eq=False)
class Recipe:
    """How a call made its rows: its ``rank_calls``, and what it ``needs``, which stays where it is for as long.

    ``stamps``: groups, and what their state was. ``copies``: the ranks that cannot do their parts without each other.
    ``moved``: the rank that has done the part of another one, which was lost.
    """

    title: str
    step: int
    rank_calls: Mapping[int, RankCall]
    stamps: Mapping[WorkerGroup, int]
    copies: Collection[tuple[int, ...]]
    needs: tuple[Stored, ...]
    moved: dict[int, int] = field(default_factory=dict[int, int])
    checks: dict[int, str] = field(default_factory=dict[int, str])  # of what each rank has kept, by its number

    @property
    def repeatable(self) -> bool:
        """Whether the workers are what they were."""
        busy = any(g.installing or g.changing or g.swapping for g in self.stamps)
        return not busy and all(g.stamp == stamp for g, stamp in self.stamps.items())

    def calls_for(self, id: int) -> dict[int, RankCall]:
        """Return the calls that make an object once more, by rank."""
        own = {rank for rank, call in self.rank_calls.items() if call.keep == id}
        own |= {rank for copy in self.copies if not own.isdisjoint(copy) for rank in copy}
        return {self.moved.get(r, r): call for r, call in self.rank_calls.items() if r in own}


class Lineage:
    """Knows which call has made which object, and which objects went with the process that held them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recipes: dict[int, Recipe] = {}
        self._gone: dict[int, int] = {}  # by rank: objects up to this number are gone
        self._remade: dict[int, int] = {}  # but for these: number, and rank
        self._copies: dict[int, int] = {}  # objects that another rank has too: number, and that rank
        self._dropped: deque[int] = deque()  # objects are dropped at any time, by whoever forgets the last value

    def note(self, recipe: Recipe, answers: Mapping[int, Reply]) -> None:
        """Keep how a call that is done has made its rows."""
        with self._lock:
            while self._dropped:
                id = self._dropped.popleft()
                self._recipes.pop(id, None)
                self._remade.pop(id, None)
                self._copies.pop(id, None)
            for rank, reply in answers.items():
                id = recipe.rank_calls[rank].keep
                if id and reply.keys is not None:
                    self._recipes[id] = recipe
                    recipe.checks[id] = reply.check

    def recipe_of(self, id: int) -> Recipe | None:
        """Return how an object was made; None for one of a step that is committed."""
        return self._recipes.get(id)

    def note_copy(self, id: int, rank: int) -> None:
        """Note that another rank has an object too."""
        with self._lock:
            self._copies[id] = rank

    def copy_of(self, id: int) -> int | None:
        """Return the rank that has an object too; None where there is none."""
        return self._copies.get(id)

    def drop(self, id: int) -> None:
        """Forget an object that nobody needs any more."""
        self._dropped.append(id)

    def settle(self, step: int) -> None:
        """Forget how the rows of a step were made, and of those before it: it is committed."""
        with self._lock:
            for id in [i for i, recipe in self._recipes.items() if recipe.step <= step]:
                del self._recipes[id]

    def lose(self, ranks: Collection[int], upto: int) -> None:
        """Note that all objects of these ranks so far are gone."""
        with self._lock:
            self._gone |= dict.fromkeys(ranks, upto)
            self._remade = {id: rank for id, rank in self._remade.items() if rank not in ranks}
            self._copies = {id: rank for id, rank in self._copies.items() if rank not in ranks}

    def note_remade(self, objects: Mapping[int, int]) -> None:
        """Note that objects are there again: number, and rank."""
        with self._lock:
            self._remade |= objects

    def missing(self, wanted: Any) -> Iterator[tuple[int, int]]:
        """Yield the objects among those that arguments ask for that are gone, as (rank, number)."""
        if not self._gone:
            return
        for part in (p for f in find_in(wanted, Fetch) for p in f.parts):
            for take in part.takes:
                if take.id <= self._gone.get(take.rank, -1) and take.id not in self._remade:
                    yield take.rank, take.id

    def forget(self) -> None:
        """Forget all objects: they are gone, and nobody will ask for them."""
        with self._lock:
            for known in (self._recipes, self._gone, self._remade, self._copies, self._dropped):
                known.clear()


def stored_in(arguments: Any) -> tuple[Stored, ...]:
    """Return the objects behind the values among arguments."""
    sources = (source for value in remote_values(arguments) for source in value.sources)
    return tuple(dict.fromkeys(stored for source in sources for stored in source.stored))
