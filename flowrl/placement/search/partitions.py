"""Which sets of models can share devices, and how many devices such a set can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def partitions(members: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Return all ways to split members into sets, each once: Bell(n) of them, 15 for four models.

    Sets stand in the order of their first members, members in the order given.

    >>> [len(list(partitions("abcd"[:n]))) for n in range(5)]
    [1, 1, 2, 5, 15]
    >>> list(partitions(["actor", "ref"]))
    [(('actor', 'ref'),), (('actor',), ('ref',))]
    """

    def grow(at: int, sets: list[list[str]]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if at == len(members):
            yield tuple(tuple(s) for s in sets)
            return
        for i in range(len(sets)):
            yield from grow(at + 1, [*sets[:i], [*sets[i], members[at]], *sets[i + 1 :]])
        yield from grow(at + 1, [*sets, [members[at]]])

    return grow(0, [])


#: In a larger cluster, whole nodes are counted in steps, so that there are about this many sizes to choose from.
MOST_NODES = 32


def node_counts(*, nodes: int, devices: int) -> tuple[int, ...]:
    """Return sizes of pools that never share a node in part: parts of a node that divide each other, then whole nodes.

    Beyond :data:`MOST_NODES` nodes, not every number of them: powers of two, and multiples of ``nodes / MOST_NODES``.

    Laid out one after another, largest first, pools of such sizes start at a multiple of their own size (each size
    divides all that come before it), so none crosses the edge of a node that it does not fill.

    >>> node_counts(nodes=3, devices=8), node_counts(nodes=1, devices=12)
    ((1, 2, 4, 8, 16, 24), (1, 3, 6, 12))
    """
    inside: list[int] = []
    size = devices
    while size > 1:
        size //= next(p for p in range(2, size + 1) if size % p == 0)
        inside.append(size)
    step = -(-nodes // MOST_NODES)
    whole = {*range(step, nodes + 1, step), nodes, *(2**k for k in range(step.bit_length()))}
    return (*reversed(inside), *(devices * n for n in sorted(whole) if n <= nodes))


def all_counts(devices: int) -> tuple[int, ...]:
    """Return every size from 1 to ``devices``."""
    return tuple(range(1, devices + 1))
