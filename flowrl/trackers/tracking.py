"""Lines of a run on their way to its trackers: each has a thread and a bounded queue, so none can stop the run."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .tracker import TrackedRun, Tracker, level_of

ROOM = 1000  # lines that wait for a tracker
PATIENCE = 15.0  # seconds that the end of a run waits for its trackers, all of them together
Line = tuple[str, Mapping[str, Any]]  # the stream that it is of, and what it says


@dataclass
class Count:
    """How many lines a tracker was given, events among them where it takes any, and how many it has not taken."""

    given: int = 0
    lost: int = 0


class Tracking:
    """The trackers of a run: ``Tracking(run, {"wandb": make}, warn)``; lines go to :meth:`tell`, as they are written.

    The steps of a program that has several loops, each counted from 0, follow one another. ``history``: the lines of
    metrics that a run which goes on has already.
    """

    def __init__(
        self,
        run: TrackedRun,
        makers: Mapping[str, Callable[[TrackedRun], Tracker]],
        warn: Callable[[str], None],
        history: Iterable[Mapping[str, Any]] = (),
        room: int = ROOM,
    ) -> None:
        self._ended = False
        self.rewind(history)
        self._deliveries = [_Delivery(name, make, run, warn, room) for name, make in makers.items()]

    def rewind(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Go back to where these were the lines of metrics: what comes after them is done again."""
        self._steps: dict[str, tuple[int, int]] = {}  # of a program what its steps are moved by, and the last one
        for line in history:
            self._place(line)

    def state(self) -> dict[str, Any]:
        """Return where the steps of programs stand, as JSON, for :meth:`restore`."""
        return {program: list(place) for program, place in self._steps.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to where this was the state."""
        self._steps = {program: (moved, last) for program, (moved, last) in state.items()}

    def tell(self, stream: str, line: Mapping[str, Any]) -> None:
        """Hand on a line of ``metrics``, ``trajectories`` or ``events``; those of other streams stay here."""
        if self._ended or stream not in ("metrics", "trajectories", "events"):
            return
        placed = dict(line)
        if stream != "events":
            placed["step"] = self._place(line) if stream == "metrics" else self._now(line)
        for delivery in self._deliveries:
            delivery.give(stream, placed)

    def close(self, status: str, patience: float = PATIENCE) -> dict[str, Count]:
        """End all trackers, and wait for them so many seconds; what each was given and has lost."""
        until = time.monotonic() + patience
        self._ended = True  # what is told of trackers that do not end is no line for them
        for delivery in self._deliveries:
            delivery.end(status)
        return {delivery.name: delivery.wait(until) for delivery in self._deliveries}

    def _place(self, line: Mapping[str, Any]) -> int:
        """Where a line of metrics stands among those of its program."""
        program, step = line["program"], line["step"]
        moved, last = self._steps.get(program, (0, -1))
        if not isinstance(step, int):
            step = last + 1 - moved
        if step + moved <= last:  # another loop, which counts anew
            moved = last + 1 - step
        self._steps[program] = (moved, step + moved)
        return step + moved

    def _now(self, line: Mapping[str, Any]) -> int:
        return self._steps.get(line["program"], (0, line["step"]))[1]


class _Delivery:
    """One tracker: what waits for it, and the thread that hands it over."""

    def __init__(
        self,
        name: str,
        make: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        warn: Callable[[str], None],
        room: int,
    ) -> None:
        self.name, self.count = name, Count()
        self._make, self._run, self._warn = make, run, warn
        self._waiting: queue.Queue[Line] = queue.Queue(room)
        self._status: str | None = None  # that the run has ended with
        self._told = self._left = False  # whether a failure was told, and whether the run waits no longer
        self._events = 0  # that were handed over
        self._rows: list[Mapping[str, Any]] = []  # samples of one step, which are handed over together
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def give(self, stream: str, line: Mapping[str, Any]) -> None:
        """Have a line wait for the tracker; it is lost where too many do."""
        self.count.given += stream != "events"
        try:
            self._waiting.put_nowait((stream, line))
        except queue.Full:
            self.count.given += stream == "events"
            self.count.lost += 1
            self._tell(f"is slower than the run: {self._waiting.maxsize} lines wait for it, and further ones are lost")

    def end(self, status: str) -> None:
        self._status = status
        with suppress(queue.Full):  # then the thread looks when it has handed over those that wait
            self._waiting.put_nowait(("end", {}))

    def wait(self, until: float) -> Count:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._told = False
            self.count.lost += sum(stream in ("metrics", "trajectories") for stream, _ in list(self._waiting.queue))
            self._tell("has not ended in time and is left alone")
        self._left = True
        self.count.given += self._events
        return self.count

    # -- in its thread ----------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            tracker = self._make(self._run)
        except BaseException as error:
            self._tell(f"could not be started, and the run goes on without it: {_first_line(error)}")
            tracker = None
        while True:
            stream, line = self._next()
            if stream == "events":  # the rows of a step stay together
                if hasattr(tracker, "event"):
                    kind, self._events = line["kind"], self._events + 1
                    self._hand(1, tracker, "event", kind, line["text"], level_of(kind))
                continue
            if stream == "trajectories" and (not self._rows or _of(self._rows[0]) == _of(line)):
                self._rows.append(line)
                continue
            if self._rows:
                rows, self._rows = self._rows, []
                self._hand(len(rows), tracker, "samples", *_of(rows[0]), rows)
            if stream == "trajectories":
                self._rows.append(line)
            elif stream == "metrics":
                self._hand(1, tracker, "log", *_of(line), numbers(line))
            else:
                if tracker is not None:
                    self._hand(0, tracker, "close", self._status)
                return

    def _next(self) -> Line:
        if self._status is not None and self._waiting.empty():
            return "end", {}
        stream, line = self._waiting.get()
        return self._next() if stream == "end" and not self._waiting.empty() else (stream, line)

    def _hand(self, lines: int, tracker: Tracker | None, method: str, *given: Any) -> None:
        try:
            if tracker is not None:
                getattr(tracker, method)(*given)
                return
        except BaseException as error:
            self._tell(f"failed, and the run goes on: {_first_line(error)}")
        self.count.lost += lines

    def _tell(self, what: str) -> None:
        """Say once what is wrong with the tracker."""
        if not self._told and not self._left:
            self._told = True
            self._warn(f"tracker {self.name} {what}")


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics, without its step.

    >>> numbers({"program": "grpo", "step": 3, "reward": 0.5, "loss": float("nan"), "note": "text"})
    {'reward': 0.5}
    """
    plain = {name: value for name, value in line.items() if name != "step" and isinstance(value, (int, float))}
    return {name: float(value) for name, value in plain.items() if math.isfinite(value)}


def _of(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["program"], line["step"]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0]}"
