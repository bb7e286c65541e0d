"""Runs sessions beside each other: each is a coroutine that asks the policy, calls user code, or waits.

A round has all user code that is quick answered, then lets the sessions that have something to ask join the policy's
batch, and goes on by a step of it. User code that is slow holds up its own session alone.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from types import coroutine
from typing import Any

from .environment_waits import EnvironmentWaits, count_waits
from .policy_calls import Answer, Ask, PolicyCalls
from .user_code.code_calls import CodeCall, CodeCalls


class OutOfTime(Exception):
    """A session has had all the seconds that it may take."""


class CodeFailed(Exception):
    """User code that a session called has failed: ``CodeFailed(call, error)``."""

    def __init__(self, call: CodeCall, error: BaseException) -> None:
        super().__init__(call, error)
        self.call, self.error = call, error


@dataclass(frozen=True, slots=True)
class Pause:
    """A session that waits so many seconds: ``Pause(7, 2.0)``."""

    session: int
    seconds: float


@coroutine
def sampled(ask: Ask) -> Generator[Ask, Answer, Answer]:
    """What the policy samples: awaiting it hands the ask to the scheduler, which comes back with the answer."""
    return (yield ask)


@coroutine
def called(call: CodeCall) -> Generator[CodeCall, Any, Any]:
    """What user code returns. Raises CodeFailed."""
    return (yield call)


@coroutine
def paused(session: int, seconds: float) -> Generator[Pause, None, None]:
    """Wait."""
    yield Pause(session, seconds)


class Sessions:
    """The sessions of one rollout, by their numbers.

    ``seconds``: what each may take; then :class:`OutOfTime` is raised in it, where it waits for a call that ``ends`` it
    not before it asks for something else. ``wasted`` is told how many tokens were sampled for a session in vain.
    """

    def __init__(
        self,
        policy: PolicyCalls,
        code: CodeCalls,
        *,
        seconds: float | None = None,
        now: Callable[[], float] = time.monotonic,
        wasted: Callable[[int, int], None] = lambda session, tokens: None,
    ) -> None:
        self._policy, self._code, self._now, self._wasted = policy, code, now, wasted
        self._deadline = math.inf if seconds is None else now() + seconds
        self._ending: set[int] = set()  # sessions that were about to end when time was up
        self._live: dict[int, Coroutine[Any, Any, None]] = {}
        self._wants: dict[int, Any] = {}  # what each live session waits for
        self._asks: list[Ask] = []
        self._calls: list[CodeCall] = []
        self._pauses: list[tuple[float, int]] = []
        self._answered: dict[int, float] = {}  # when the policy did last
        self._waits = EnvironmentWaits()

    def run(self, sessions: Mapping[int, Coroutine[Any, Any, None]]) -> None:
        """Run sessions to their ends. Raises what one of them raises, and ends the others."""
        self._live = dict(sessions)
        try:
            for session in sessions:
                self._resume(session)
            while self._live:
                self._round()
        finally:
            for coroutine in self._live.values():
                coroutine.close()
            self._live.clear()
            self._policy.close()
            self._code.close()
            count_waits(self._waits)

    def _round(self) -> None:
        self._answer_code()
        self._end_late()
        if self._asks:
            asks, self._asks = self._asks, []
            self._count_waits(asks)
            self._policy.ask(asks)
        if self._policy.waiting:
            answers = self._policy.answers()
            now, answered = self._now(), self._answered
            for answer in answers:
                answered[answer.session] = now
                self._resume(answer.session, answer)

    def _count_waits(self, asks: list[Ask]) -> None:
        """Count how long sessions were away that come back."""
        now, answered, waits = self._now(), self._answered, self._waits
        for ask in asks:
            if ask.follows:
                waits.count += 1
                waits.seconds += now - answered[ask.session]

    def _answer_code(self) -> None:
        """Go on with the sessions whose code has ended, until all that is under way is slow."""
        quick = True
        while quick or self._calls:
            calls, self._calls = self._calls, []
            if calls:
                self._code.begin(calls)
            ended, quick = self._code.collect(self._idle_seconds())
            for call in ended:
                outcome, call.outcome = call.outcome, None  # an exception has frames that have the call
                if call.session in self._live and self._wants.get(call.session) is call:
                    failed = CodeFailed(call, outcome) if isinstance(outcome, BaseException) else None
                    self._resume(call.session, outcome, failed)
            self._wake()
            if self._now() >= self._deadline:
                break

    def _idle_seconds(self) -> float:
        """How long may be waited for slow code: not at all where there is something to sample."""
        if self._asks or self._policy.waiting or not self._live:
            return 0.0
        until = min(self._deadline, self._pauses[0][0] if self._pauses else math.inf)
        if not self._code.under_way and not self._calls and until < math.inf:
            time.sleep(min(max(0.0, until - self._now()), 60.0))
            return 0.0
        return min(max(0.0, until - self._now()), 60.0)

    def _wake(self) -> None:
        while self._pauses and self._pauses[0][0] <= self._now():
            _, session = heapq.heappop(self._pauses)
            if isinstance(self._wants.get(session), Pause):
                self._resume(session)

    def _end_late(self) -> None:
        """Raise OutOfTime in every session where time is up, and that is not about to end; forget what it waits for."""
        if self._now() < self._deadline:
            return
        self._deadline = math.inf
        self._ending = {session for session in self._live if _is_end(self._wants[session])}
        late = [session for session in self._live if session not in self._ending]
        asked = {session for session in late if isinstance(self._wants[session], Ask)}
        self._asks = [ask for ask in self._asks if ask.session not in asked]
        for session, tokens in self._policy.forget(asked).items():
            self._wasted(session, tokens)
        for session in late:
            wanted = self._wants[session]
            if isinstance(wanted, CodeCall):
                self._code.forget(wanted)
                self._calls = [call for call in self._calls if call is not wanted]
            self._resume(session, error=OutOfTime())

    def _resume(self, session: int, value: Any = None, error: Exception | None = None) -> None:
        coroutine = self._live[session]
        try:
            request = coroutine.send(value) if error is None else coroutine.throw(error)
            if session in self._ending and not _is_end(request):  # such as another attempt
                self._ending.discard(session)
                request = coroutine.throw(OutOfTime())
        except StopIteration:
            del self._live[session]
            self._wants.pop(session, None)
            return
        self._wants[session] = request
        if isinstance(request, Ask):
            self._asks.append(request)
        elif isinstance(request, CodeCall):
            self._calls.append(request)
        else:
            heapq.heappush(self._pauses, (self._now() + request.seconds, session))


def _is_end(request: Any) -> bool:
    """Whether a session has played all that it plays, and waits for what comes of it."""
    return isinstance(request, CodeCall) and request.ends
