"""How many of each source go to each sink, so that what they carry is worth most: the transportation problem, exactly.

Successive shortest paths over the sinks, of which there are few: a source goes where it is worth most, and where that
is full, others move on along the chain of moves that loses least. Every partial solution is optimal for the sources
that it has (Ahuja, Magnanti, Orlin, *Network Flows*, 1993, section 9.7), so the last one is optimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush


def transport(
    supply: Sequence[int], capacity: Sequence[int], worth: Sequence[Mapping[int, int]]
) -> list[dict[int, int]]:
    """Return for each source how many go to each sink: its whole supply, none above capacity, the total worth highest.

    ``worth[source]`` is per piece and by sink; a sink that is not in it is worth 0 to that source.

    >>> transport([1, 1], [1, 1], [{0: 5, 1: 4}, {0: 3}])  # 4 + 3 is more than 5 + 0
    [{1: 1}, {0: 1}]

    Raises ValueError when the supply is larger than the capacity.
    """
    if sum(supply) > sum(capacity):
        raise ValueError(f"a supply of {sum(supply)} does not fit a capacity of {sum(capacity)}")
    problem = _Problem(list(capacity), worth)
    # Those with the most to lose first: fewer of them have to move on later.
    for source in sorted(range(len(supply)), key=lambda a: -max(worth[a].values(), default=0)):
        left = supply[source]
        while left:
            left -= problem.send(source, left)
    return problem.flow


class _Problem:
    """The flow so far, and what is least lost when a source moves on from one sink to another."""

    def __init__(self, free: list[int], worth: Sequence[Mapping[int, int]]) -> None:
        self.free, self.worth = free, worth
        self.flow: list[dict[int, int]] = [{} for _ in worth]
        self.at: list[set[int]] = [set() for _ in free]  # the sources at each sink
        self.moves: list[list[tuple[int, int]] | None] = [None] * len(free)  # by sink: (lost, source) to each other one
        self.price = [0] * len(free)

    def send(self, source: int, most: int) -> int:
        """Send up to ``most`` of a source along the best chain; returns how many."""
        path = self._path(source)
        moved = [self.flow[mover][before] for (mover, _), (_, before) in zip(path[1:], path, strict=False)]
        count = min(most, self.free[path[-1][1]], *moved)
        self.free[path[-1][1]] -= count
        for i, (mover, sink) in enumerate(path):
            if i:
                self._add(mover, path[i - 1][1], -count)
            self._add(mover, sink, count)
        return count

    def _add(self, source: int, sink: int, count: int) -> None:
        now = self.flow[source].get(sink, 0) + count
        if now:
            self.flow[source][sink] = now
            self.at[sink].add(source)
        else:
            del self.flow[source][sink]
            self.at[sink].discard(source)
        self.moves[sink] = None

    def _moves(self, sink: int) -> list[tuple[int, int]]:
        """The least loss, and whose, of moving one source from a full sink to each sink."""
        found = self.moves[sink]
        if found is None:
            best: dict[int, tuple[int, int]] = {}
            plain: tuple[int, int] | None = None  # to a sink that is worth nothing to the source
            for a in self.at[sink]:
                own = self.worth[a].get(sink, 0)
                plain = min(plain, (own, a)) if plain else (own, a)
                for b, value in self.worth[a].items():
                    lost = (own - value, a)
                    if b not in best or lost < best[b]:
                        best[b] = lost
            # Of a source that values b, ``best`` has the loss, which is the smaller one.
            found = [min(best.get(b, plain), plain) for b in range(len(self.free))] if plain else []  # no room at all
            self.moves[sink] = found
        return found

    def _path(self, source: int) -> list[tuple[int, int]]:
        """The chain of moves that loses least: (who, to where), the first being ``source``, the last where room is.

        Dijkstra's algorithm on losses plus prices, which are never below 0.
        """
        mine, price = self.worth[source], self.price
        start = max(mine.get(b, 0) + price[b] for b in range(len(price)))
        far = [start - mine.get(b, 0) - price[b] for b in range(len(price))]
        come: list[tuple[int, int]] = [(source, -1)] * len(price)
        heap = [(d, 0 if self.free[b] else 1, b) for b, d in enumerate(far)]
        heap.sort()
        done: set[int] = set()
        while True:
            d, _, b = heappop(heap)
            if b in done:
                continue
            done.add(b)
            if self.free[b]:
                break
            for to, (lost, mover) in enumerate(self._moves(b)):
                through = d + lost + price[b] - price[to]
                if to not in done and through < far[to]:
                    far[to], come[to] = through, (mover, b)
                    heappush(heap, (through, 0 if self.free[to] else 1, to))
        for x in done:  # keeps every reduced loss at or above 0
            price[x] -= d - far[x]
        return _unwind(come, b)


def _unwind(come: list[tuple[int, int]], sink: int) -> list[tuple[int, int]]:
    path: list[tuple[int, int]] = []
    while sink >= 0:
        mover, before = come[sink]
        path.append((mover, sink))
        sink = before
    return path[::-1]
