"""Which prompt groups a step trains: its own, or finished ones of the open steps within a window."""

from __future__ import annotations

from bisect import insort
from collections import deque


def width(groups: int, staleness: int, fraction: float) -> int:
    """How many groups from the oldest untaken one on may be taken: max(1, floor(f (S+1) P))."""
    return max(1, int(fraction * (staleness + 1) * groups))


class Window:
    """Groups in the order of their prompts, taken a step at a time.

    A step takes as many groups as it has prompts, each the oldest finished one among the ``width`` that begin with
    the oldest untaken one. Every group is taken once and none is dropped; lag grows by at most ceil((width-1)/P).

    >>> window = Window(staleness=1, fraction=0.5)
    >>> window.admit(0, 2); window.admit(1, 2)
    >>> window.finished(0, 1), window.finished(1, 1), window.finished(0, 0)
    ([], [], [(0, ((0, 1), (0, 0)))])
    """

    def __init__(self, staleness: int, fraction: float) -> None:
        self._staleness, self._fraction = staleness, fraction
        self._first: dict[int, int] = {}  # the number of a generate's first group
        self._owner: dict[int, tuple[int, int]] = {}  # untaken groups: (generate, group)
        self._done: list[int] = []  # finished and untaken, oldest first
        self._wanting: deque[tuple[int, int]] = deque()  # generates that wait for their rows, and how many
        self._taking: list[tuple[int, int]] = []
        self._admitted = 0
        self._head = 0

    def admit(self, call: int, groups: int) -> None:
        """A generate of so many groups begins."""
        self._first[call] = self._admitted
        for group in range(groups):
            self._owner[self._admitted + group] = (call, group)
        self._admitted += groups
        self._wanting.append((call, groups))

    def finished(self, call: int, group: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """A group is done. Returns the generates whose rows are complete by it, with the groups that they got."""
        insort(self._done, self._first[call] + group)
        complete: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        while self._wanting and self._done:
            wanting, groups = self._wanting[0]
            if self._done[0] >= self._head + width(groups, self._staleness, self._fraction):
                break
            number = self._done.pop(0)
            self._taking.append(self._owner.pop(number))
            while self._head < self._admitted and self._head not in self._owner:
                self._head += 1
            if len(self._taking) == groups:
                complete.append((wanting, tuple(self._taking)))
                self._wanting.popleft()
                self._taking = []
        return complete
