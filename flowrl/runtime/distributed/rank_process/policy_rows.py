"""The rows that environments on other ranks have in the engine of a policy here: in one batch, which they join and
leave one by one.

A thread makes the steps, as long as somebody waits for rows and has none yet. So one environment alone finds its rows
beside the same others each time, whatever the way to this rank takes; of several, those that wait keep the batch going.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ....errors import RunError
from ....workers.streaming import SampledRow, SampleRequest
from ..protocol import Asked, Polled

#: Seconds that who waits for rows is kept waiting, before it is told that there are none yet and asks again.
PATIENCE = 0.5
#: Seconds for which the thread that makes the steps stays when nobody waits.
LINGER = 1.0


class OpenCall(Protocol):
    """A call of a stream, under the number that its engine gave it."""

    number: int

    @property
    def open(self) -> int: ...
    @property
    def is_over(self) -> bool: ...


class RowStream(Protocol):
    """The stream of an engine, which any thread may use: :class:`flowrl.backends.stream.Stream`."""

    steps: int

    def submit_all(self, requests: Sequence[SampleRequest]) -> Sequence[Any]: ...
    def step(self) -> None: ...
    def has_news(self, calls: Iterable[Any]) -> bool: ...
    def take(self, calls: Iterable[Any]) -> list[SampledRow]: ...
    def tokens_since(self, known: Mapping[Any, Mapping[int, int]]) -> list[SampledRow]: ...
    def abort_rows(self, wanted: Mapping[Any, Iterable[int] | None]) -> list[SampledRow]: ...
    def leave(self, calls: Collection[Any]) -> list[SampledRow]: ...


@dataclass
class _Caller:
    """Somebody who asks: its calls that are not over, by its own numbers."""

    first: int  # steps of the engine before it came
    calls: dict[int, OpenCall] = field(default_factory=dict[int, Any])
    latest: int = 0  # the largest number that it has asked with
    waits: int = 0  # how often at a time

    @property
    def open(self) -> int:
        """How many of its rows were not handed out."""
        return sum(call.open for call in self.calls.values())


class PolicyRows:
    """The rows of those that ask one policy. Any thread may call it."""

    def __init__(self, stream: RowStream) -> None:
        self.stream = stream
        self._callers: dict[str, _Caller] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._ended: set[str] = set()  # those whose rows somebody else has ended
        self._renewed = 0  # how often; a step that was begun before one fails nobody after it

    def poll(
        self,
        name: str,
        asked: Sequence[Asked],
        seconds: float = PATIENCE,
        heard: Mapping[int, Mapping[int, int]] | None = None,
    ) -> Polled:
        """Have calls of somebody join the batch; return its rows that have ended, which may take ``seconds``.

        ``heard``: by call and row how many tokens are known of rows that somebody listens to. Raises the error of a
        call that cannot go on, and what the engine raised, which is of no more use.
        """
        with self._changed:
            self._raise_failure()
            self.expect_open(name)
            caller = self._callers.setdefault(name, _Caller(self.stream.steps))
        if asked:
            self._join(caller, asked)
            self._leave_with(name, caller)
        with self._changed:
            if seconds and not self._is_served(caller):
                self._wait(caller, seconds)
            self._raise_failure()
            polled = self._hand_out(caller)
            known = {call: rows for number, rows in (heard or {}).items() if (call := caller.calls.get(number))}
            calls = dict(caller.calls)
        grown = self.stream.tokens_since(known) if known else ()
        return replace(polled, grown=tuple(self._as_asked(calls, grown)))

    def abort(self, name: str, rows: Mapping[int, Iterable[int]], latest: int) -> list[SampledRow]:
        """End rows of somebody, by call; return them as they are. ``latest``: the last call that it has sent."""
        with self._changed:
            self._raise_failure()
            self._changed.wait_for(lambda: self._has_come(name, latest), PATIENCE)
            open = self._callers[name].calls if name in self._callers else {}
            calls = {number: open[number] for number in rows if number in open}
        ended = self.stream.abort_rows({call: rows[number] for number, call in calls.items()})
        with self._changed:
            self._forget_over(open)
            self._changed.notify_all()
        return self._as_asked(calls, ended)

    def leave(self, name: str, latest: int) -> list[SampledRow]:
        """End all rows of somebody, who asks for no more; see :meth:`abort`."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_come(name, latest), PATIENCE)
            caller = self._callers.pop(name, None)
            calls = {} if caller is None else dict(caller.calls)
            if caller is not None:
                caller.calls.clear()
            self._changed.notify_all()
        return self._as_asked(calls, self.stream.leave(list(calls.values())))

    def end(self) -> None:
        """End the rows of all: nobody waits for them any more, as who has asked for them may have died. Who has not
        gets no others."""
        for name in list(self._callers):
            self._ended.add(name)
            with suppress(RunError):  # an engine that has failed has no rows
                self.leave(name, 0)

    def expect_open(self, name: str) -> None:
        """Raise RunError for somebody whose rows were ended by others."""
        if name in self._ended:
            raise RunError("The policy has its turn again: rows that were asked for before are ended.")

    def renew(self) -> None:
        """End the rows of all, and what has failed: the run goes back to a checkpoint."""
        self.end()
        with self._changed:
            self._broken, self._renewed = None, self._renewed + 1

    def _join(self, caller: _Caller, asked: Sequence[Asked]) -> None:
        begun: Sequence[OpenCall] = ()
        try:
            begun = self.stream.submit_all([each.request for each in asked])
        finally:
            with self._changed:
                caller.calls |= {a.number: call for a, call in zip(asked, begun, strict=False)}
                caller.latest = max(caller.latest, *(a.number for a in asked))
                self._changed.notify_all()

    def _leave_with(self, name: str, caller: _Caller) -> None:
        """End what has joined for somebody whose rows were ended meanwhile: nobody would ask for it."""
        with self._changed:
            if self._callers.get(name) is caller:
                return
            calls = list(caller.calls.values())
            caller.calls.clear()
        self.stream.leave(calls)
        self.expect_open(name)

    def _raise_failure(self) -> None:
        """Raise what the engine has failed with."""
        if self._broken is not None:
            raise self._broken

    def _has_come(self, name: str, latest: int) -> bool:
        """Whether somebody's calls are here, up to a number: those that are on their way would never be ended."""
        return not latest or (name in self._callers and self._callers[name].latest >= latest)

    def _hand_out(self, caller: _Caller) -> Polled:
        rows = self._as_asked(caller.calls, self.stream.take(caller.calls.values()))
        self._forget_over(caller.calls)
        return Polled(tuple(rows), caller.open, caller.latest, caller.first, self.stream.steps)

    @staticmethod
    def _as_asked(calls: Mapping[int, OpenCall], rows: Iterable[SampledRow]) -> list[SampledRow]:
        """Return rows under the numbers by which who asked knows their calls."""
        numbers = {call.number: number for number, call in calls.items()}
        return [replace(row, call=numbers[row.call]) for row in rows]

    @staticmethod
    def _forget_over(calls: dict[int, OpenCall]) -> None:
        for number in [number for number, call in calls.items() if call.is_over]:
            del calls[number]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _is_served(self, caller: _Caller) -> bool:
        """Whether there is nothing to wait for: it has something to be told, or no rows."""
        return self._broken is not None or not caller.calls or self.stream.has_news(caller.calls.values())

    def _wait(self, caller: _Caller, seconds: float) -> None:
        caller.waits += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_steps, name="flowrl-policy-rows", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        try:
            self._changed.wait_for(lambda: self._is_served(caller), seconds)
        finally:
            caller.waits -= 1

    def _is_wanted(self) -> bool:
        """Whether somebody waits who is not served by what there is."""
        return any(caller.waits and not self._is_served(caller) for caller in self._callers.values())

    def _make_steps(self) -> None:
        """Make steps while they are wanted, and a moment longer wait for that."""
        while True:
            with self._changed:
                if not self._changed.wait_for(self._is_wanted, LINGER):
                    self._thread = None
                    return
                renewed, failed = self._renewed, None
            try:
                self.stream.step()
            except BaseException as error:  # told to all that wait
                failed = error
            with self._changed:
                if failed is not None and renewed == self._renewed:
                    self._broken = failed
                self._changed.notify_all()
