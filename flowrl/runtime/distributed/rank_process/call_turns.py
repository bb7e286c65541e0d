"""Which call of a rank may ask the world: one at a time for the same rows of a place in the program, as the journal
answers the rest.

A rank goes on with its part of a call that the driver has given up, since another rank died, and is sent the call anew.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Hashable
from contextlib import contextmanager

from ....errors import RunError


class CallTurns:
    """The turns of calls: ``with turns.turn((0, 17)): ...`` once no other has this place. Any thread may use it.

    A place is whatever tells calls apart that may be beside each other: the chunks of a call have places of their own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[Hashable, object] = {}
        self._newest: dict[Hashable, object] = {}

    @contextmanager
    def turn(self, place: Hashable) -> Generator[None]:
        """Hold a place inside, once who has it is through.

        Raises RunError where the call comes once more meanwhile, or the run goes back: nobody waits for this one then.
        """
        mine = object()
        with self._changed:
            self._newest[place] = mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._newest.get(place) is not mine or place not in self._running)
            if self._newest.get(place) is not mine:
                raise RunError("the call was sent again, or the run has gone back: nobody waits for this one.")
            self._running[place] = mine
        try:
            yield
        finally:
            with self._changed:
                for known in (self._running, self._newest):
                    if known.get(place) is mine:
                        del known[place]
                self._changed.notify_all()

    def forget(self) -> None:
        """Leave all places to the calls that come from here on: the run goes back. Those that have them may not end."""
        with self._changed:
            self._running.clear()
            self._newest.clear()
            self._changed.notify_all()
