"""Which prompt groups a step trains: its own, or finished ones of the open steps within a window."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping

from .events import Groups


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

    def __init__(self, staleness: int, fraction: float, taken: Mapping[int, Groups] | None = None) -> None:
        """``taken``: the groups that a generate is to get, as in an earlier run, whatever has ended by then."""
        self._staleness, self._fraction, self._known = staleness, fraction, dict(taken or {})
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

    def finished(self, call: int, group: int) -> list[tuple[int, Groups]]:
        """A group is done. Returns the generates whose rows are complete by it, with the groups that they got."""
        insort(self._done, self._first[call] + group)
        return self._take()

    def free(self) -> list[tuple[int, Groups]]:
        """Give generates what the rules give them from here on, and not what they got in an earlier run."""
        self._known.clear()
        return self._take()

    def _take(self) -> list[tuple[int, Groups]]:
        complete: list[tuple[int, Groups]] = []
        while self._wanting and self._done:
            wanting, groups = self._wanting[0]
            if wanting in self._known:
                if not self._take_known(self._known[wanting]):
                    break
                complete.append((wanting, self._known.pop(wanting)))
                self._wanting.popleft()
                continue
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

    def _take_known(self, groups: Groups) -> bool:
        """Take these groups if all of them are finished; return whether they are."""
        numbers = [self._first[call] + group for call, group in groups if call in self._first]
        if len(numbers) < len(groups) or not set(numbers) <= set(self._done):
            return False
        for number in numbers:
            self._done.remove(number)
            del self._owner[number]
        while self._head < self._admitted and self._head not in self._owner:
            self._head += 1
        return True
