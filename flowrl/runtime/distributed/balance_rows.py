"""Rows over ranks so that each has about as many tokens (Karmarkar and Karp 1982), or those whose prefix it has."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from ...batch import Key


def balanced(sizes: Sequence[int], parts: int, units: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
    """Row numbers of each part, ascending, so that the sums of ``sizes`` are close to each other.

    ``units``: rows that stay together; None lets each go alone. The two most uneven partial solutions are joined, the
    large half of one with the small half of the other, until one is left.

    >>> balanced([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    groups = [[i] for i in range(len(sizes))] if units is None else [list(u) for u in units]
    if parts == 1:
        return [sorted(i for g in groups for i in g)]
    heap: list[tuple[int, int, list[tuple[int, int, list[int]]]]] = []
    for number, rows in enumerate(groups):
        total = sum(sizes[i] for i in rows)
        empty = [(0, -1, list[int]()) for _ in range(parts - 1)]
        heap.append((-total, number, [(total, number, rows), *empty]))
    if not heap:
        return [[] for _ in range(parts)]
    heapify(heap)
    while len(heap) > 1:
        _, first, a = heappop(heap)
        _, second, b = heappop(heap)
        # the largest part of one with the smallest of the other
        both = [(x[0] + y[0], max(x[1], y[1]), x[2] + y[2]) for x, y in zip(a, reversed(b), strict=True)]
        both.sort(key=lambda part: (-part[0], part[1]))
        heappush(heap, (both[-1][0] - both[0][0], min(first, second), both))
    return [sorted(rows) for _, _, rows in heap[0][2]]


def longest_first(keys: Sequence[Key], part: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the rows of a part, those of the longest prompt first: what begins last is short.

    >>> longest_first([(7,), (8,), (8, 1), (9,)], [0, 1, 2, 3], [5, 4, 4, 9])
    [3, 1, 2, 0]
    """
    total: dict[int, int] = {}
    for row in part:
        total[keys[row][0]] = total.get(keys[row][0], 0) + sizes[row]
    place = {uid: number for number, uid in enumerate(dict.fromkeys(keys[row][0] for row in part))}
    return sorted(part, key=lambda row: (-total[keys[row][0]], place[keys[row][0]]))


def by_prefix(
    sizes: Sequence[int],
    parts: int,
    homes: Sequence[int | None],
    alike: Sequence[object] = (),
    *,
    most: float = 1.25,
    loads: Sequence[int] = (),
) -> list[list[int]]:
    """Row numbers of each part: each row in the part that has its prefix, as ``homes`` says, where there is room.

    A part takes ``most`` times the mean of the tokens; with ``loads``, what parts are at counts too. Rows that find
    no room there, and those without a home, go to the part that has least, the largest first; those that are ``alike``,
    unless that is None, go together.

    >>> by_prefix([8, 8, 6, 2], 2, [1, 1, None, 0])
    [[1, 3], [0, 2]]
    >>> by_prefix([3, 3, 3, 3], 2, [None] * 4, ["a", "b", "a", "b"])
    [[0, 2], [1, 3]]
    >>> by_prefix([4, 4], 2, [None] * 2, loads=[9, 0])
    [[], [0, 1]]
    """
    loads = list(loads) or [0] * parts
    room = max(most * (sum(sizes) + sum(loads)) / parts, max(sizes, default=0))
    found, left = [list[int]() for _ in range(parts)], list[int]()

    def put(row: int, part: int) -> None:
        loads[part] += sizes[row]
        found[part].append(row)

    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        home = homes[row]
        if home is None or loads[home] + sizes[row] > room:
            left.append(row)
        else:
            put(row, home)
    where: dict[object, int] = {}
    for row in left:
        of = alike[row] if alike else None
        part = where.get(of, -1) if of is not None else -1
        if part < 0 or loads[part] + sizes[row] > room:
            part = where[of] = loads.index(min(loads))
        put(row, part)
    return [sorted(rows) for rows in found]
