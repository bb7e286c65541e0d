"""Ways for weights from one worker group to another: planned and connected once, until one of its ranks is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..transfer.plan_moves import Moves

if TYPE_CHECKING:
    from .rank_client import RankClient
    from .worker_group import WorkerGroup


@dataclass(frozen=True)
class Route:
    """A way for weights: its name on the ranks, the moves, and which number each rank has in them."""

    name: str
    moves: Moves
    numbers: dict[int, int]


class Routes:
    """The routes between the worker groups of a run."""

    def __init__(self, client: RankClient) -> None:
        self.client = client
        self._routes: dict[tuple[object, ...], Route] = {}

    def find(self, source: WorkerGroup, target: WorkerGroup) -> Route:
        """Return the route from one group to another; plans it, and connects the ranks, the first time."""
        ends = (source.key, source.ranks, target.key, target.ranks)
        if ends not in self._routes:
            self._routes[ends] = self._connect(source, target)
        return self._routes[ends]

    def _connect(self, source: WorkerGroup, target: WorkerGroup) -> Route:
        client, ranks = self.client, sorted({*source.ranks, *target.ranks})
        numbers = {rank: n for n, rank in enumerate(ranks)}
        moves = target.plan_from(source, numbers)
        name = f"{source.title}-{target.title}.{client.new_id()}"  # who connects again has another one
        meeting = None
        if moves.total:
            meeting = client.call_all(ranks[:1], "meeting_point")[ranks[0]]
        seconds = (client.deadline or 240.0) + 60
        ends = {rank: (name, moves, n, len(ranks), meeting, seconds) for rank, n in numbers.items()}
        sent = client.send("connect", ends)
        try:
            what = f"connecting {source.title} with {target.title}"
            client.wait(sent, what, lambda: self._disconnect(name, ranks))
        except BaseException:  # some may wait for one that is gone; whoever restarts it may wait for them
            self._disconnect(name, ranks)
            raise
        return Route(name, moves, numbers)

    def drop(self, source: WorkerGroup, target: WorkerGroup) -> None:
        """Forget a route that nobody takes again. Who waits on it for others does so no longer."""
        route = self._routes.pop((source.key, source.ranks, target.key, target.ranks), None)
        if route is not None:
            self._disconnect(route.name, route.numbers)

    def forget_ranks(self, ranks: Collection[int]) -> None:
        """Forget the routes of ranks that were started anew."""
        for ends, route in list(self._routes.items()):
            if not set(route.numbers).isdisjoint(ranks):
                del self._routes[ends]
                self._disconnect(route.name, [r for r in route.numbers if r not in ranks])

    def clear(self) -> None:
        """Forget all routes; the ranks forget them by themselves."""
        self._routes.clear()

    def _disconnect(self, name: str, ranks: Iterable[int]) -> None:
        there = self.client.link.where
        for rank in ranks:
            if rank in there:  # one that is gone for good is not
                self.client.link.send(rank, "disconnect", name)
