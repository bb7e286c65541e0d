"""Which call of a rank may ask the world: one at a time for a row of a place in the program, as the journal answers the
rest.

A rank goes on with its part of a call that the driver has given up, since another rank died, and is sent the call anew:
with the same rows, or with those of the other one too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass

from ....errors import RunError


@dataclass(frozen=True, eq=False)
class _Turn:
    """A call at a place of the program, with its rows: ``_Turn((0, 17), frozenset({(4, 0), (4, 1)}))``."""

    place: Hashable
    rows: frozenset[Hashable]

    def meets(self, other: _Turn) -> bool:
        """Whether they would ask for the same."""
        return self.place == other.place and (self.rows == other.rows or not self.rows.isdisjoint(other.rows))


class CallTurns:
    """The turns of calls: ``with turns.turn((0, 17), rows.keys): ...`` once no other has any of these rows. Any thread
    may use it.

    The chunks of a call have a place in common, and no rows.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: list[_Turn] = []
        self._waiting: list[_Turn] = []

    @contextmanager
    def turn(self, place: Hashable, rows: Collection[Hashable] = ()) -> Generator[None]:
        """Hold rows of a place inside, once all that have one of them are through.

        Raises RunError where one of them comes once more meanwhile, or the run goes back: nobody waits for this call
        then.
        """
        mine = _Turn(place, frozenset(rows))
        with self._changed:
            self._waiting = [*(other for other in self._waiting if not mine.meets(other)), mine]
            self._changed.notify_all()
            self._changed.wait_for(lambda: mine not in self._waiting or not any(map(mine.meets, self._running)))
            if mine not in self._waiting:
                raise RunError("the call was sent again, or the run has gone back: nobody waits for this one.")
            self._waiting.remove(mine)
            self._running.append(mine)
        try:
            yield
        finally:
            with self._changed:
                if mine in self._running:
                    self._running.remove(mine)
                self._changed.notify_all()

    def forget(self) -> None:
        """Leave all rows to the calls that come from here on: the run goes back. Those that have them may not end."""
        with self._changed:
            self._running.clear()
            self._waiting.clear()
            self._changed.notify_all()
