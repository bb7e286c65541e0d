"""Which of several holders sends a piece to each of those that lack it: in their node, and who has sent least.

To another node a piece goes once: of those there that lack it, one gets it and passes it on. They take turns at that.
Equal pieces of weights that are cut alike are dealt together, so that what everybody sends can be counted without a
list of millions of moves: :func:`share_out` counts what :func:`deal` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from .boxes import Box

#: The node of a process, as a number or a name.
Node = Callable[[int], object]


@dataclass(frozen=True)
class Lot:
    """A piece on its way from any of ``sources`` to each of ``count`` targets, inside a node or to other nodes.

    Targets are those of ``group`` without ``others``, who hold it or have a holder in their node.
    """

    box: Box
    sources: tuple[int, ...]
    inside: bool
    count: int
    group: Sequence[int]
    others: frozenset[int]

    def targets(self) -> Sequence[int]:
        """Return the targets, in order."""
        return [t for t in self.group if t not in self.others] if self.others else self.group

    def by_node(self, node: Node | None) -> list[tuple[int, ...]]:
        """Return the targets to which it is sent once: each of those in the node of a holder, all of another node."""
        if self.inside or node is None:
            return [(target,) for target in self.targets()]
        there: dict[object, list[int]] = {}
        for target in self.targets():
            there.setdefault(node(target), []).append(target)
        return [tuple(group) for group in there.values()]


class Turns:
    """Who brings a piece into a node, of so many targets there: whoever has brought least so far.

    It is counted by the place among the targets of a node, so that nodes that are alike are dealt alike, and at once.
    """

    def __init__(self) -> None:
        self._brought: dict[tuple[int, int], Counter[int]] = {}

    def list(self, first: int, count: int, size: int, times: int) -> list[int]:
        """Return the place for each of ``times`` pieces; ``first`` is the first target of all that are to have it."""
        return deal(self._brought.setdefault((first, count), Counter()), range(count), size, times)

    def share(self, first: int, count: int, size: int, times: int) -> dict[int, int]:
        """Return by place how much of the same it brings."""
        brought = self._brought.setdefault((first, count), Counter())
        shares = dict(share_out(brought, range(count), size, times))
        brought.update(shares)
        return shares


def lots_of(targets: Sequence[int], pieces: Iterable[tuple[Box, tuple[int, ...]]], node: Node | None) -> Iterator[Lot]:
    """Yield what targets lack of pieces that all of them are to have, each with its holders.

    >>> lots = lots_of([1, 2, 3], [(((0, 4),), (0, 1))], lambda process: process // 2)
    >>> [(lot.sources, lot.targets()) for lot in lots]
    [((0, 1), [2, 3])]
    """
    there, by_node = frozenset(targets), dict[object, list[int]]()
    if node is not None:
        for target in targets:
            by_node.setdefault(node(target), []).append(target)
    for box, holders in pieces:
        have = there.intersection(holders)
        if node is None:
            if len(have) < len(targets):
                yield Lot(box, holders, True, len(targets) - len(have), targets, have)
            continue
        near: dict[object, list[int]] = {}
        for holder in holders:
            near.setdefault(node(holder), []).append(holder)
        served: list[int] = []
        for name, sources in near.items():
            group = by_node.get(name, ())
            served += group
            own = have.intersection(group)
            if len(own) < len(group):
                yield Lot(box, tuple(sources), True, len(group) - len(own), group, own)
        if len(served) < len(targets):
            yield Lot(box, holders, False, len(targets) - len(served), targets, frozenset(served))


class _Away:
    """Targets of nodes that lack something, by node; by how many they are there, what each of their places brings."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        self.brought = {count: Counter[int]() for count in sorted({len(group) for group in groups}) if count > 1}


class Passing:
    """What passes each process, lot by lot, without lists of who gets what.

    ``sent``: numbers of all moves so far by who sends, ``inside`` those inside a node, ``near`` the latter by who
    receives. ``passed_on`` and ``taken_over``: of the same those that came from another node before.
    """

    def __init__(self, node: Node | None) -> None:
        self.sent, self.inside, self.near = Counter[int](), Counter[int](), Counter[int]()
        self.passed_on, self.taken_over = Counter[int](), Counter[int]()
        self._turns = Turns()
        self._nodes: dict[int, object] = {}
        self._node = node

    def add(self, targets: Sequence[int], sizes: Iterable[tuple[int, tuple[int, ...]]], times: int) -> None:
        """Count pieces of so many numbers, ``times`` each, that all targets are to have, with their holders."""
        there = frozenset(targets)
        by_node: dict[object, list[int]] = {}
        for target in targets:
            by_node.setdefault(self._at(target), []).append(target)
        near, own = dict[object, int](), dict[int, int]()  # numbers that a node has here, those of its own of a target
        away: dict[frozenset[object], _Away] = {}  # by the nodes that have them
        for size, holders in sizes:
            whole, served = size * times, 0
            sources: dict[object, list[int]] = {}
            for holder in holders:
                sources.setdefault(self._at(holder), []).append(holder)
                if holder in there:
                    own[holder] = own.get(holder, 0) + whole
            with_it: list[object] = []
            for name, beside in sources.items():
                group = by_node.get(name)
                if group is None:
                    continue
                served += len(group)
                with_it.append(name)
                near[name] = near.get(name, 0) + whole
                lacking = len(group) - sum(holder in there for holder in beside)
                if lacking:
                    self._send(beside, size, times * lacking, inside=True)
            if served < len(targets):
                key = frozenset(with_it)
                if key not in away:
                    away[key] = _Away([group for name, group in by_node.items() if name not in key])
                self._send(holders, size, times * len(away[key].groups), inside=False)
                for count, brought in away[key].brought.items():
                    brought.update(self._turns.share(targets[0], count, size, times))
        for name, numbers in near.items():
            for target in by_node[name]:
                if more := numbers - own.get(target, 0):
                    self.near[target] += more
        for each in away.values():
            for group in each.groups:
                if len(group) > 1:
                    self._pass_on(group, each.brought[len(group)])

    def _pass_on(self, there: Sequence[int], brought: Mapping[int, int]) -> None:
        """Count what the targets of a node give each other of what they have brought, by their places."""
        whole = sum(brought.values())
        for place, target in enumerate(there):
            gives, gets = brought.get(place, 0) * (len(there) - 1), whole - brought.get(place, 0)
            if gives:
                for of in (self.sent, self.inside, self.passed_on):
                    of[target] += gives
            if gets:
                self.near[target] += gets
                self.taken_over[target] += gets

    def _send(self, sources: Sequence[int], size: int, count: int, *, inside: bool) -> None:
        for source, numbers in share_out(self.sent, sources, size, count):
            self.sent[source] += numbers
            if inside:
                self.inside[source] += numbers

    def _at(self, process: int) -> object:
        if self._node is None:
            return None
        if process not in self._nodes:
            self._nodes[process] = self._node(process)
        return self._nodes[process]


def deal(sent: Counter[int], sources: Sequence[int], size: int, count: int) -> list[int]:
    """Return who sends each of ``count`` equal pieces: always who has sent least, of equals the first.

    What they send is added to ``sent``.

    >>> deal(Counter({7: 10}), (7, 8), 4, 5)
    [8, 8, 8, 7, 8]
    """
    if len(sources) == 1:
        sent[sources[0]] += size * count
        return [sources[0]] * count
    heap, found = [(sent[source], source) for source in sources], list[int]()
    heapify(heap)
    for _ in range(count):
        least, source = heap[0]
        heapreplace(heap, (least + size, source))
        found.append(source)
    for total, source in heap:
        sent[source] = total
    return found


def share_out(sent: Mapping[int, int], sources: Sequence[int], size: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield by source how much it sends of ``count`` equal pieces, as :func:`deal` has it, without dealing each.

    >>> dict(share_out({7: 10, 8: 0}, (7, 8), 4, 5))
    {8: 16, 7: 4}
    """
    if len(sources) == 1 and count:
        yield sources[0], size * count
        return
    order = sorted((sent.get(source, 0), source) for source in sources)
    while True:  # who has sent so much that the others get everything has no part in it
        top = order[-1][0]
        level = sum(-((before - top) // size) for before, _ in order)
        if level <= count:
            break
        order.pop()
    shares = {source: -((before - top) // size) for before, source in order}
    each, rest = divmod(count - level, len(order))
    first = sorted((before + shares[source] * size, source) for before, source in order)[:rest]
    more = {source for _, source in first}
    for source, share in shares.items():
        if number := share + each + (source in more):
            yield source, number * size
