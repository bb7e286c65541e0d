"""What a run is at: it opens a worker, or a program runs. Threads that look on ask here what goes on and what waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import Stalled
from ..executor import Executor
from .monitoring.hang_watch import HangWatch, Signs
from .monitoring.wait_notes import WaitNotes
from .monitoring.wait_story import WaitStory, wait_story
from .run_position import RunPosition
from .run_settings import Settings
from .running_program import Running


class RunActivity:
    """``RunActivity(executor, position)``: the run says what it begins and ends; any thread may ask the rest."""

    def __init__(self, executor: Executor, position: RunPosition) -> None:
        self.session: Running | None = None  # while a program runs
        self._executor, self._position = executor, position
        self._since = time.monotonic()  # when the last program ended, or the run began
        self._opening = ""  # the worker that is being opened

    @contextmanager
    def opening(self, worker: str) -> Iterator[None]:
        """A worker is opened inside the block."""
        self._opening, self._since = worker, time.monotonic()
        try:
            yield
        finally:
            self._opening, self._since = "", time.monotonic()

    def end_program(self) -> None:
        """The program has ended."""
        self.session, self._since = None, time.monotonic()

    def waits(self) -> tuple[Mapping[str, Any], float]:
        """Return what the run waits for now, and for how long nothing has happened."""
        session = self.session
        if session is not None:
            return session.waits()
        waits = {"opening": self._opening, "ranks": self._executor.unanswered()}
        return waits, time.monotonic() - self._since

    def events(self) -> tuple[float, ...]:
        """Return what changes with each event that the driver knows of."""
        session = self.session
        return (self._since, self._position.number, -1 if session is None else session.events)

    def signs(self) -> Signs:
        """Return what shows that the run goes on."""
        session = self.session
        own = session is not None and session.dispatcher.under_way.runs_own_ops_alone()
        return Signs(self.events(), self._executor.headway(), own)

    def watches(self, settings: Settings, end: Callable[[Stalled], None]) -> tuple[WaitNotes, HangWatch]:
        """Return what notes the waits of the run, and what ends it once nothing goes on: by ``end``, in its thread."""
        notes = WaitNotes(settings.out, settings.script, self.waits)
        first = self._position.executions[0]

        def story() -> WaitStory:
            notes.write()
            return wait_story(settings.out)

        def break_off(error: Stalled) -> None:
            if (session := self.session) is not None:
                session.break_off(error)
            end(error)

        limit = 0.0 if first.runtime == "eager" else first.plan.pipeline.hang  # where a debugger works, nothing goes on
        return notes, HangWatch(limit, events=self.events, signs=self.signs, story=story, end=break_off)
