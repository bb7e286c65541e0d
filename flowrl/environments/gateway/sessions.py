"""Sessions of agents: calls come from the server's loop, whoever plays the episode takes them in another thread."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from .requests import Refused, Reply, Request
from .shown_text import sure_text

_AT_ONCE = 64  # calls of a session that wait for an answer
_PER_SECOND = 200.0  # calls of a session that begin in a second
_KEPT = 256  # responses of a session that a later call may go on from by their ids


@dataclass(frozen=True)
class Begun:
    """An answer that is being sampled: the id of its reply, the tokens before it, and what makes text of its ids.

    ``text_of`` is None where the text of more tokens may not begin with that of fewer.
    """

    id: str
    prompt_tokens: int
    text_of: Callable[[Sequence[int]], str] | None


@dataclass(frozen=True)
class Piece:
    """A piece of the text of an answer that is being sampled, with what its reply has too: ``Piece("1f", 12, "2")``."""

    id: str
    prompt_tokens: int
    text: str


@dataclass(eq=False)
class ModelCall:
    """A call of an agent that waits for its answer.

    Whoever plays the episode begins it, shows its ids as they come where it ``streams``, and answers it, from any
    thread. ``is_gone``: the agent waits no longer.
    """

    request: Request
    loop: asyncio.AbstractEventLoop
    answered: asyncio.Future[Reply]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    begun: Begun | None = None
    ids: Sequence[int] = ()
    is_gone: bool = False
    _told: bool = False

    @property
    def streams(self) -> bool:
        """Whether ids are to be shown as they come."""
        return self.request.stream and self.begun is not None and self.begun.text_of is not None

    def show(self, ids: Sequence[int]) -> None:
        """Show what is sampled so far."""
        self.ids = ids
        if not self._told:
            self._told = True
            self._call(self._tell)

    def answer(self, reply: Reply) -> None:
        """Answer it."""
        self._settle(lambda: self.answered.set_result(reply))

    def refuse(self, refused: Refused) -> None:
        """Refuse it."""
        self._settle(lambda: self.answered.set_exception(refused))

    def _settle(self, how: Callable[[], None]) -> None:
        def settle() -> None:
            if not self.answered.done():
                how()
            self.changed.set()

        self._call(settle)

    def _tell(self) -> None:
        self._told = False
        self.changed.set()

    def _call(self, fn: Callable[[], None]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(fn)


@dataclass(frozen=True)
class Ended:
    """An agent has ended: ``Ended("42")``, or with the exception that it raised."""

    result: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class Session:
    """What one agent does: its calls in their order, then its end. ``token`` is its key."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    responses: OrderedDict[str, list[Any]] = field(default_factory=OrderedDict[str, list[Any]], repr=False)
    _at_end: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    _calls: deque[ModelCall] = field(default_factory=deque[ModelCall])
    _ended: Ended | None = None
    _closed: str = ""
    _under_way: set[ModelCall] = field(default_factory=set[ModelCall])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taker: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
    _credit: float = _PER_SECOND
    _since: float = field(default_factory=time.monotonic)

    async def ask(self, request: Request) -> Reply:
        """Wait for the answer to a request, in the loop of the server. Raises Refused."""
        async with aclosing(self.ask_streamed(request)) as found:
            while not isinstance(reply := await anext(found), Reply):
                pass
            return reply

    async def ask_streamed(self, request: Request) -> AsyncGenerator[Piece | Reply]:
        """The same, with pieces of its text before the reply, where the request is for a stream."""
        loop = asyncio.get_running_loop()
        call, sent = ModelCall(request, loop, loop.create_future()), ""
        with self._lock:
            self._admit()
            self._calls.append(call)
            self._under_way.add(call)
            self._wake()
        try:
            while not call.answered.done():
                await call.changed.wait()
                call.changed.clear()
                if call.answered.done() or call.begun is None or call.begun.text_of is None or not call.ids:
                    continue
                said = sure_text(call.begun.text_of(call.ids), request)
                if len(said) > len(sent) and said.startswith(sent):
                    yield Piece(call.begun.id, call.begun.prompt_tokens, said[len(sent) :])
                    sent = said
            yield call.answered.result()
        finally:
            call.is_gone = not call.answered.done()
            call.answered.cancel()
            with self._lock:
                self._under_way.discard(call)

    def keep(self, name: str, items: list[Any]) -> None:
        """Keep the items of a response, in the loop of the server; the oldest are forgotten."""
        self.responses[name] = items
        while len(self.responses) > _KEPT:
            self.responses.popitem(last=False)

    def _admit(self) -> None:
        if self._closed:
            raise Refused(410, self._closed)
        now = time.monotonic()
        self._credit = min(_PER_SECOND, self._credit + (now - self._since) * _PER_SECOND)
        self._since = now
        if len(self._under_way) >= _AT_ONCE or self._credit < 1:
            raise Refused(429, f"a session has {_AT_ONCE} calls under way at most, and {_PER_SECOND:.0f} in a second")
        self._credit -= 1

    async def take(self) -> ModelCall | Ended:
        """Wait for the next call, or for the agent's end, in another loop."""
        while True:
            loop = asyncio.get_running_loop()
            with self._lock:
                while self._calls:
                    if not (call := self._calls.popleft()).is_gone:
                        return call
                if self._ended is not None:
                    return self._ended
                waiting: asyncio.Future[None] = loop.create_future()
                self._taker = loop, waiting
            await waiting

    def end(self, ended: Ended) -> None:
        """Note that the agent has ended."""
        with self._lock:
            self._ended = self._ended or ended
            self._wake()

    def close(self, why: str) -> None:
        """Refuse all calls, those under way and those to come, and end what runs for the agent."""
        with self._lock:
            if self._closed:
                return
            self._closed = why
            calls = list(self._under_way)
            self._calls.clear()
        for call in calls:
            call.refuse(Refused(410, why))
        for end in self._at_end:
            end()

    def at_end(self, end: Callable[[], None]) -> None:
        """Run something as it is closed; at once where it is."""
        with self._lock:
            if not self._closed:
                self._at_end.append(end)
                return
        end()

    def _wake(self) -> None:
        if self._taker is None:
            return
        loop, waiting = self._taker
        self._taker = None
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: waiting.done() or waiting.set_result(None))
