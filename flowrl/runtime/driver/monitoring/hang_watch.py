"""Ends a run that has come to a standstill: its error says what it waited for, and who is to blame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ....errors import Stalled
from ....workers.headway import Headway
from .wait_story import WaitStory

LOOK = 2.0  # seconds between two looks
MOST = 15.0  # seconds between two looks that count: this process may have been stopped in between
BUSY = 0.1  # the part of a processor from which on a process is at something


@dataclass(frozen=True)
class Signs:
    """What shows that a run goes on: ``Signs(731, {"driver": Headway(1780, 12.5)}, own=True)``.

    ``events`` counts those of the schedule, ``processes`` how far each has come. ``own``: all that runs are ops of
    flowrl, whose passes and rows are counted; else whoever uses a processor is at something, too.
    """

    events: Hashable = None
    processes: Mapping[str, Headway] = field(default_factory=dict[str, Headway])
    own: bool = False

    def goes_on_since(self, before: Signs, seconds: float) -> bool:
        """Whether something has happened since these earlier ones, ``seconds`` ago."""
        if self.events != before.events:
            return True
        for name, now in self.processes.items():
            if (then := before.processes.get(name)) is None:  # nobody had looked at it
                continue
            if now.count != then.count:
                return True
            if not self.own and now.seconds - then.seconds > BUSY * seconds:
                return True
        return False


class HangWatch:
    """Looks at a run from a thread of its own. ``limit``: the seconds without any progress that it may take; 0: all.

    ``events`` gives the signs that the driver has, ``signs`` those of all processes, which is dearer: it is asked while
    the driver has none. ``story`` tells what the run waits for, and ``end`` ends it with an error, in its own thread.
    """

    def __init__(
        self,
        limit: float,
        *,
        events: Callable[[], Hashable],
        signs: Callable[[], Signs],
        story: Callable[[], WaitStory],
        end: Callable[[Stalled], None],
    ) -> None:
        self.limit = limit
        self._events, self._signs, self._story, self._end_run = events, signs, story, end
        self._last = Signs()
        self._asked = self._looked = time.monotonic()
        self._still = 0.0  # seconds without a sign
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look every few seconds inside the block."""
        if not self.limit:
            yield
            return
        thread = threading.Thread(target=self._look_on, daemon=True, name="flowrl-hang")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(LOOK)  # it may be asking ranks

    def look(self) -> bool:
        """End the run where nothing has gone on for too long; return whether it was ended."""
        now = time.monotonic()
        self._still += min(now - self._looked, MOST)
        self._looked = now
        if self._events() != self._last.events:
            self._last, self._still, self._asked = Signs(self._events()), 0.0, now
        elif now - self._asked >= min(self.limit, max(LOOK, self.limit / 20)):
            signs = self._signs()
            if signs.goes_on_since(self._last, now - self._asked):
                self._still = 0.0
            self._last, self._asked = signs, now
        if self._still < self.limit:
            return False
        self._end_run(self._error())
        return True

    def _error(self) -> Stalled:
        """The error of the run, with the chain of its waits."""
        try:
            story = self._story()
        except Exception as error:  # such as a folder that is gone
            story = WaitStory("", blame=f"somebody whom the folder does not tell ({error})")
        lines = [f"Nothing has gone on for {self._still:.0f} s, so the run is ended.", *map(str, story.waits)]
        blame = [f"To blame: {story.blame}"] if story.blame else []
        longer = f"give the plan a longer pipeline.hang than {self.limit:g}, or 0 to wait for ever"
        return Stalled("\n  ".join([*lines, *blame]), fix=f"See to that, and go on with --resume; or {longer}.")

    def _look_on(self) -> None:
        while not self._over.wait(LOOK):
            with suppress(Exception):  # a run does not fail as somebody could not look at it
                if self.look():
                    return
